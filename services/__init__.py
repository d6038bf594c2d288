"""The API service: HTTP and text. It tokenizes, renders chats and streams; it never schedules or touches tensors."""
