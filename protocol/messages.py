"""Every message that crosses a process border, as tagged, array-like msgspec Structs.

Rules (CONTRACT.md says them for other languages): fields are only ever *appended*, with a default; columns are
little-endian packed integers (see `columns`); a request id is an unsigned 64-bit integer chosen by the API.
Nothing here holds text of a conversation except error messages and a request's label.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from protocol.sampling import PromptLogprobs as PromptLogprobs
from protocol.sampling import SamplingParams as SamplingParams
from protocol.sampling import TokenLogprobs as TokenLogprobs


class RequestStatus(IntEnum):
    """A request's state. Everything after PREEMPTED is terminal: `is_finished` is a comparison, so order matters."""

    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    WAITING_FOR_REMOTE_KV = 2
    WAITING_FOR_INPUT = 3
    RUNNING = 4
    PREEMPTED = 5
    STOPPED = 6
    LENGTH = 7
    ABORTED = 8
    IGNORED = 9
    ERROR = 10
    REPETITION = 11

    @property
    def is_finished(self) -> bool:
        """True for a terminal state."""
        return self > RequestStatus.PREEMPTED


class _Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all messages. Subclasses carry their tag."""


# --- handshake ------------------------------------------------------------------------------------------------


class Hello(_Message, tag="hello", frozen=True):
    """First message on a connection, from the side that connects.

    `epoch` is the largest epoch the sender has seen (0: none). `takeover` asks a runner to dismiss the scheduler
    that holds it. `instance` is 16 random hex digits, new at every process start.
    """

    role: str
    version: int
    schema_digest: str
    instance: str
    epoch: int = 0
    takeover: bool = False
    name: str = ""


class Limits(_Message, tag="limits", frozen=True):
    """What the model and its KV pool allow, as the runner measured them.

    `num_blocks` includes the null block 0, so usable capacity is `(num_blocks - 1) * block_size` tokens.
    `vocab_size` counts the ids that may be sampled or sent (the tokenizer's, never the padded head's).
    """

    model: str
    block_size: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    kv_bytes_per_block: int = 0
    max_logprobs: int = 20
    host_blocks: int = 0


class Welcome(_Message, tag="welcome", frozen=True):
    """Answer to an accepted Hello.

    From the runner: `epoch` is granted here and larger than any before it; `hash_key` keys the block hashes and
    `inventory_blocks`/`inventory_hashes` (i32 ids, 16 bytes each) say which pages hold which block. From the
    scheduler: `epoch` is the one it commands with; `limits` is None until a runner has welcomed it.
    """

    role: str
    version: int
    schema_digest: str
    instance: str
    epoch: int
    limits: Limits | None = None
    hash_key: bytes = b""
    inventory_blocks: bytes = b""
    inventory_hashes: bytes = b""
    lease_ms: int = 10_000


class Refused(_Message, tag="refused", frozen=True):
    """A Hello (or a message without a session) that is not accepted. `code` is one of the constants in `wire`."""

    code: str
    message: str


class Goodbye(_Message, tag="goodbye", frozen=True):
    """The sender leaves on purpose; what it owned ends or is taken over.

    `code`: "shutdown", "fenced", "takeover", or "restart": the session is over, a new one is welcome.
    """

    code: str
    message: str = ""


class Heartbeat(_Message, tag="heartbeat", frozen=True):
    """Sent by both sides of every link at least twice per second; says that the sender's loop turns."""

    sent_ns: int
    busy_since_ns: int = 0


# --- API -> scheduler -----------------------------------------------------------------------------------------


class Submit(_Message, tag="submit", frozen=True):
    """A request in full: everything needed to start it, or to go on with it after another process died.

    `prompt` and `emitted` are i32 columns; `emitted` are the output tokens the client side already has.
    `arrival_ns` is wall-clock time (ns since 1970) at the API. `label` is the client's name for it: logs only.
    `resumed` marks a request that a scheduler has accepted before: it is exempt from the queue limit.
    `timeout_ms` > 0 bounds the wait for the first admission, `deadline_ms` > 0 is when (after arrival) the request
    wants to be done: the order of the `deadline` queue, no limit. `routing_key` groups requests for that queue.
    `open` means that more of the prompt follows in Extend messages; nothing is sampled before the last one.
    `kv_source` names a KV transfer that brings the prompt's KV; the request waits for it, or recomputes if it fails.
    Requests share KV only with the same `cache_salt`, `adapter` and `adapter_generation` (which load of the adapter).
    Of prompt log-probabilities, those of the tokens before index `prompt_logprobs_from` are here already.
    """

    id: int
    prompt: bytes
    params: SamplingParams
    emitted: bytes = b""
    arrival_ns: int = 0
    priority: int = 0
    label: str = ""
    cache_salt: str = ""
    tenant: str = ""
    resumed: bool = False
    timeout_ms: int = 0
    deadline_ms: int = 0
    routing_key: str = ""
    open: bool = False
    kv_source: str = ""
    adapter: str = ""
    adapter_generation: int = 0
    prompt_logprobs_from: int = 0


class Extend(_Message, tag="extend", frozen=True):
    """More of the prompt of a request that was submitted `open` (i32 column). `last` closes it: then it is sampled."""

    id: int
    tokens: bytes
    last: bool = False


class Control(_Message, tag="control", frozen=True):
    """An operator's or an API's question or order. Answered by one ControlReply with the same `nonce`.

    `action` is one of `scheduler.control.ACTIONS`: "pause", "resume", "drain", "reset_prefix_cache", "set", "status",
    "timeline", "explain". Values of `arguments` are texts.
    """

    nonce: int
    action: str
    arguments: dict[str, str] = {}


class Abort(_Message, tag="abort", frozen=True):
    """The API gives up on these requests (u64 column). Idempotent; unknown ids are ignored."""

    ids: bytes


# --- scheduler -> API -----------------------------------------------------------------------------------------


class Rejected(_Message, tag="rejected", frozen=True):
    """A Submit that was not accepted. `status` is the HTTP status that fits; `retry_after_s` > 0 asks to retry."""

    id: int
    code: str
    message: str
    status: int = 400
    retry_after_s: int = 0
    param: str = ""


class Finished(_Message, tag="finished", frozen=True):
    """A request's one terminal event, with what it cost.

    `status` is a terminal RequestStatus. `stop_token` is the id that ended it (-1: none). Times in ns:
    `queue_ns` from arrival in the scheduler to first admission.
    """

    id: int
    status: RequestStatus
    stop_token: int = -1
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queue_ns: int = 0
    code: str = ""
    message: str = ""


class ControlReply(_Message, tag="control_reply", frozen=True):
    """The answer to a Control: `body` is JSON; if not `ok`, an object with "code" and "message"."""

    nonce: int
    ok: bool
    body: bytes


class Outputs(_Message, tag="outputs", frozen=True):
    """All that one API process gets from one step: one message, whatever the number of requests.

    Parallel columns: `ids` u64, `positions` i32 (index of the token among the request's outputs, from 0),
    `tokens` i32. Order within the message: accepted, rejected, prompt_logprobs, tokens, finished.
    """

    epoch: int
    step_id: int
    ids: bytes = b""
    positions: bytes = b""
    tokens: bytes = b""
    accepted: bytes = b""
    rejected: list[Rejected] = []
    finished: list[Finished] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[PromptLogprobs] = []


class SchedulerStatus(_Message, tag="status", frozen=True):
    """The scheduler's truth about the chain, sent with every heartbeat to an API: what /health and /ready answer from.

    `runner`: "ready", "absent" or "stuck"; of `replicas` runners `replicas_up` are. `stalled_ms`: for so long work is
    pending with no step finished. `waiting_timeout_ms` bounds the wait for the first admission if a request doesn't
    (0: nothing does). `queued` requests wait for it; while there are `queue_limit` (0: no limit) or more, a new one is
    rejected, unless the scheduler `displaces` and its priority is below `least_urgent`, the highest that waits.
    """

    epoch: int
    runner: str
    running: int
    waiting: int
    kv_usage: float
    stalled_ms: int = 0
    draining: bool = False
    limits: Limits | None = None
    waiting_timeout_ms: int = 0
    queue_limit: int = 0
    queued: int = 0
    displaces: bool = False
    least_urgent: int = 0
    replicas: int = 1
    replicas_up: int = 0


# --- scheduler -> runner --------------------------------------------------------------------------------------


class NewRequest(_Message, tag="new", frozen=True):
    """A request's full data: sent once per residency, in the step that first computes it.

    `tokens` i32 is prompt plus emitted outputs; the first `num_prompt` are the prompt. `num_computed` of them are
    already in the KV pages listed first in `block_ids` (i32, whole blocks). `incarnation` names this residency: no
    other one of this id, nor of a later request with this id, has the same. Of prompt log-probabilities, those from
    index `prompt_logprobs_from` on are to be reported.
    """

    id: int
    incarnation: int
    tokens: bytes
    num_prompt: int
    num_computed: int
    block_ids: bytes
    params: SamplingParams
    prompt_logprobs_from: int = 0


class CompileGrammar(_Message, tag="compile_grammar", frozen=True):
    """Compile a grammar for a request that waits for it. Answered by GrammarStatus, in no particular order."""

    id: int
    grammar: str


class FetchKv(_Message, tag="fetch_kv", frozen=True):
    """Bring the KV of a request's first `num_tokens` tokens from `source` into these pages (i32, whole blocks).

    The pages are those of the last of these tokens: what comes before has its KV already. They are the transfer's until
    KvStatus answers, whatever becomes of the request; steps that were sent earlier may write to them before it begins.
    """

    id: int
    incarnation: int
    source: str
    num_tokens: int
    block_ids: bytes


class Step(_Message, tag="step", frozen=True):
    """One step: a map request id -> number of tokens to compute, and what changed since the step before.

    `ids` u64 and `num_tokens` i32 are the map, in batch order (decode rows need not come first).
    `left` u64: requests the runner may forget *before* this step. `grow_rows` i32 are indices into `ids` whose
    block table grows; `grow_counts` i32 says by how many; `grow_blocks` i32 are those ids, row after row.
    `filled_blocks` i32 / `filled_hashes` (16 bytes each): blocks that are full once this step (or an earlier one)
    has run. A request samples when the step reaches its last known token. `swap_out`/`swap_in` i32 pairs of
    (device block, host block): copies out happen before anything in this step is written, copies in before read.
    """

    epoch: int
    step_id: int
    ids: bytes
    num_tokens: bytes
    new: list[NewRequest] = []
    left: bytes = b""
    grow_rows: bytes = b""
    grow_counts: bytes = b""
    grow_blocks: bytes = b""
    filled_blocks: bytes = b""
    filled_hashes: bytes = b""
    swap_out: bytes = b""
    swap_in: bytes = b""


# --- runner -> scheduler --------------------------------------------------------------------------------------


class RowError(_Message, tag="row_error", frozen=True):
    """One request of a step failed (non-finite logits, say) while the others are fine."""

    id: int
    incarnation: int
    code: str
    message: str


class StepFailure(_Message, tag="step_failure", frozen=True):
    """The whole step failed and wrote nothing that may be trusted."""

    code: str
    message: str


class GrammarStatus(_Message, tag="grammar_status", frozen=True):
    """A grammar is compiled (`message` empty) or can't be (`message` says why).

    It needs no incarnation: the grammar belongs to the id, so that a late answer is as true of a later residency.
    """

    id: int
    message: str = ""


class KvStatus(_Message, tag="kv_status", frozen=True):
    """A KV transfer has ended and touches its pages no more: `num_tokens` arrived (0: none, `message` says why)."""

    id: int
    incarnation: int
    num_tokens: int
    message: str = ""


class StepResult(_Message, tag="step_result", frozen=True):
    """What one step produced. Columns hold only the rows that sampled.

    `positions` i32 is the index of the sampled token in the request's whole sequence (prompt included): the first
    output of a 10-token prompt has position 10. Timings in ns: `queue_ns` from receipt to start, `execute_ns` the
    step itself, `idle_ns` how long the runner had nothing to do before it, `copy_ns` the part of it that swaps took.
    `prompt_logprobs` come from any row that asks for them, sampling or not.
    """

    epoch: int
    step_id: int
    ids: bytes = b""
    incarnations: bytes = b""
    positions: bytes = b""
    tokens: bytes = b""
    logprobs: list[TokenLogprobs] = []
    errors: list[RowError] = []
    failure: StepFailure | None = None
    queue_ns: int = 0
    execute_ns: int = 0
    idle_ns: int = 0
    copy_ns: int = 0
    prompt_logprobs: list[PromptLogprobs] = []


ApiToScheduler = Hello | Heartbeat | Goodbye | Submit | Extend | Abort | Control
SchedulerToApi = Welcome | Refused | Goodbye | Heartbeat | SchedulerStatus | Outputs | ControlReply
SchedulerToRunner = Hello | Heartbeat | Goodbye | Step | CompileGrammar | FetchKv
RunnerToScheduler = Welcome | Refused | Goodbye | Heartbeat | StepResult | GrammarStatus | KvStatus
