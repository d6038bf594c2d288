"""The runner's settings: one frozen class that flags, environment and files fill. Nothing here reads them."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.settings import SettingError, check, setting


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """What one runner process is told. Sizes of 0 mean "decide from the model and the machine"."""

    model: str = setting("", help="GGUF file or Hugging Face directory to load")
    served_model_name: str = setting("smollm2-135m-instruct", help="model id that clients use")
    backend: str = setting(
        "model", choices=("model", "sim"), help="model: compute for real; sim: a cost model in place of tensors"
    )
    device: str = setting("cpu", choices=("cpu", "cuda"), help="where the model computes")
    dtype: str = setting(
        "auto", choices=("auto", "bfloat16", "float32", "float16"), help="weights and KV type; auto: the checkpoint's"
    )
    attention_backend: str = setting(
        "auto", choices=("auto", "native", "torch"), help="CPU kernels: native (C++), torch, or the fastest that works"
    )
    num_threads: int = setting(0, minimum=0, help="CPU threads for computing; 0: all this process may use")
    kv_cache_memory_bytes: int = setting(
        0, unit="bytes", minimum=0, help="memory for KV pages; 0: measured (see memory_utilization)"
    )
    memory_utilization: float = setting(
        0.4,
        minimum=0.01,
        maximum=0.95,
        help="part of the memory that is free after loading which KV pages may take, at most 4 GiB on the CPU",
    )
    gpu_memory_utilization: float = setting(
        0.9,
        minimum=0.05,
        maximum=1.0,
        help="cuda: part of the GPU's whole memory that weights, work and KV pages may take together",
    )
    num_blocks_override: int = setting(
        0, unit="blocks", minimum=0, help="exact number of KV blocks, null block included; 0: from the memory"
    )
    swap_space_bytes: int = setting(0, unit="bytes", minimum=0, help="host memory for swapped-out KV pages; 0: no swap")
    block_size: int = setting(16, unit="tokens", minimum=1, maximum=256, help="tokens per KV block")
    max_model_len: int = setting(0, unit="tokens", minimum=0, help="longest prompt plus output; 0: the model's")
    max_num_seqs: int = setting(256, unit="requests", minimum=1, maximum=65536, help="requests in one step at most")
    max_num_batched_tokens: int = setting(
        0, unit="tokens", minimum=0, help="tokens in one step at most; 0: what suits the device (CPU 256, else 2048)"
    )
    lease_s: float = setting(
        10.0, unit="s", minimum=0.5, help="a scheduler silent for this long may be replaced by another"
    )
    step_deadline_s: float = setting(
        120.0,
        unit="s",
        minimum=0,
        help="a step that takes longer, and longer than ten times the slowest so far, counts as hung; 0: none does",
    )
    tensor_parallel_size: int = setting(
        1, unit="ranks", minimum=1, maximum=1024, help="processes over which each layer of the model is split"
    )
    distributed_executor_backend: str = setting(
        "mp",
        choices=("mp", "ray"),
        help="where the other ranks run: mp: processes of this machine; ray: wherever Ray places them. A runner that "
        "torchrun starts has its ranks already",
    )
    quantization: str = setting(
        "none", choices=("none", "int8", "fp8", "int4"), help="weights of the blocks in fewer bits, through torchao"
    )
    kv_cache_dtype: str = setting(
        "auto", choices=("auto", "fp8_e4m3"), help="cuda: type of the KV pages; auto: the model's"
    )
    enforce_eager: bool = setting(False, help="cuda: record no graphs, launch every kernel of every step")
    forbid_waiting: bool = setting(
        False, help="cuda: once started, make it an error if the host waits for the device where it isn't meant to"
    )
    data_parallel_rank: int = setting(
        -1, minimum=-1, maximum=63, help="which of several replicas this is, from 0; -1: the only one"
    )
    rank_timeout_s: float = setting(
        10.0, unit="s", minimum=1, help="a rank that does not answer for this long is lost, and the runner with it"
    )

    sim_step_ms: float = setting(10.0, unit="ms", minimum=0, help="sim: fixed cost of a step")
    sim_token_us: float = setting(0.0, unit="us", minimum=0, help="sim: cost of each token in a step")
    sim_context_ns: float = setting(
        0.0, unit="ns", minimum=0, help="sim: cost of each token that a row of the step has in the KV"
    )
    sim_row_us: float = setting(0.0, unit="us", minimum=0, help="sim: cost of each row of a step")
    sim_overlap: bool = setting(
        False, help="sim: fixed cost and token cost overlap, as on a GPU: a step takes the larger of them, not the sum"
    )
    sim_num_blocks: int = setting(8192, unit="blocks", minimum=2, help="sim: KV blocks, null block included")
    sim_host_blocks: int = setting(
        0, unit="blocks", minimum=0, help="sim: host blocks for swap; 0: as many as swap_space_bytes hold"
    )
    sim_kv_bytes_per_block: int = setting(
        1 << 20, unit="bytes", minimum=1, help="sim: what one KV block is taken to weigh"
    )
    sim_copy_gb_s: float = setting(
        0.0, unit="GB/s", minimum=0, help="sim: rate of swaps, whose time is added to their step; 0: they take none"
    )
    sim_grammar_ms: float = setting(0.0, unit="ms", minimum=0, help="sim: time until a grammar is compiled")
    sim_kv_fetch_ms: float = setting(0.0, unit="ms", minimum=0, help="sim: time until KV from elsewhere has arrived")
    sim_vocab_size: int = setting(49152, unit="ids", minimum=3, help="sim: number of token ids")
    sim_first_token_id: int = setting(0, minimum=0, help="sim: smallest id it emits (to keep clear of special ids)")
    sim_max_model_len: int = setting(8192, unit="tokens", minimum=2, help="sim: longest prompt plus output")
    sim_eos_token_id: int = setting(2, minimum=0, help="sim: the id that ends a text")
    sim_eos_rate: float = setting(
        0.0, minimum=0, maximum=1, help="sim: probability that an output token is the end (0: outputs end by length)"
    )
    sim_poison_token: int = setting(
        -1, minimum=-1, help="sim: a step that computes this id goes wrong, as a fault to test with (-1: none)"
    )
    sim_poison_fault: str = setting(
        "fail", choices=("fail", "kill", "hang"), help="sim: what it does: fail, kill the process, or never return"
    )
    sim_seed: int = setting(0, minimum=0, help="sim: mixed into every token")
    sim_strict: bool = setting(True, help="sim: fail a step that breaks the paging rules, naming the fault")

    runtime_dir: str = setting("/tmp/triptych", help="private directory for sockets")
    runner_address: str = setting("", help="where the scheduler connects; empty: ipc socket in runtime_dir")
    curve_key_file: str = setting(
        "", help="key pair that `triptych keygen` wrote; over TCP only processes with the same pair are let in"
    )
    allow_insecure_bind: bool = setting(
        False, help="listen on a TCP address that others can reach although there is no key"
    )
    log_level: str = setting("info", choices=("debug", "info", "warning", "error"), help="least level that is logged")
    log_interval_s: float = setting(
        10.0, unit="s", minimum=0, help="seconds between status lines while working; 0: none"
    )
    metrics_port: int = setting(0, minimum=0, maximum=65535, help="TCP port for Prometheus; 0: unix socket only")
    metrics_host: str = setting("127.0.0.1", help="TCP host for Prometheus")

    def __post_init__(self) -> None:
        check(self)
        if self.backend == "sim" and self.tensor_parallel_size > 1:
            raise SettingError(f"tensor_parallel_size: got {self.tensor_parallel_size}, the sim backend has one rank")
        if self.backend == "sim" and self.sim_eos_token_id >= self.sim_vocab_size:
            raise SettingError(f"sim_eos_token_id: got {self.sim_eos_token_id}, must be below {self.sim_vocab_size}")
        if self.backend == "sim" and self.sim_first_token_id > self.sim_vocab_size - 2:
            raise SettingError(
                f"sim_first_token_id: got {self.sim_first_token_id}, at most {self.sim_vocab_size - 2} "
                f"leaves two of the {self.sim_vocab_size} ids"
            )

    @property
    def step_tokens(self) -> int:
        """Tokens in one step at most. On a CPU a step of 256 takes about 60 ms with a small model: larger ones compute
        no faster, and everybody's next token waits for them."""
        if self.max_num_batched_tokens:
            return self.max_num_batched_tokens
        return 256 if self.backend == "model" and self.device == "cpu" else 2048

    @property
    def address(self) -> str:
        """Where to bind."""
        return self.runner_address or f"ipc://{self.runtime_dir}/{self._name}.sock"

    @property
    def metrics_path(self) -> str:
        """The unix socket that always serves the metrics."""
        return f"{self.runtime_dir}/{self._name}.metrics.sock"

    @property
    def _name(self) -> str:
        return "runner" if self.data_parallel_rank < 0 else f"runner-{self.data_parallel_rank}"
