"""Our own CPU kernels: C++ source, its build at first use, and the ctypes binding."""
