"""Rules by which causes of failure are recognised: what a rule is, and the whole table.

The rules themselves are data: of the machines in `rules_machines`, of the programs in
`rules_programs`.

Rules for what the cluster, its machines, their memory, disks and networks do to a run.

Rules for what programs say of their own faults, and of those of the person who started them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from tasks.spec.failure_kinds import FailureKind
from tasks.spec.failure_kinds import FailureKind as _K


class Role(IntEnum):
    """What a text tells of the order of events; the lower one is believed, wherever it stands."""

    #: Nothing else brings it about: memory or a disk ran out, a device broke, GPUs were missing.
    CAUSE = 0
    #: An error that has a name, though it may follow from something else.
    ERROR = 1
    #: Any error that a traceback ends with.
    EXCEPTION = 2
    #: It follows from the death or the silence of something else.
    CASCADE = 3
    #: It only says that something else has failed.
    WRAPPER = 4
    #: All that there is to say where nothing else was recognised.
    LAST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One text and what it means."""

    id: str
    kind: FailureKind
    role: Role
    #: Searched in what each line says, without the marks of time, level and process before it.
    #: It must never cross lines, and take time in proportion to a line's length.
    pattern: re.Pattern[str]
    #: What the user can do.
    hint: str = ""
    #: Where the text comes from: a file of a project, an issue, a page of ours.
    source: str
    #: The version whose text was seen; "any" where it has been the same for many years.
    seen_in: str
    #: Believed even in a line that is marked as a warning: Ray and the kernel warn of deaths.
    at_any_level: bool = False


def rule(
    id: str,
    kind: FailureKind,
    role: Role,
    pattern: str,
    *,
    source: str,
    seen_in: str,
    hint: str = "",
    at_any_level: bool = False,
) -> Rule:
    """The rule, its pattern compiled; `^` begins a line."""
    return Rule(
        id=id,
        kind=kind,
        role=role,
        pattern=re.compile(pattern, re.MULTILINE),
        hint=hint,
        source=source,
        seen_in=seen_in,
        at_any_level=at_any_level,
    )


_BROKEN_GPU = "a GPU is defective: drain its node and try another"
_GPU_MEMORY = "a GPU ran out of memory: smaller micro-batches, or more tensor parallelism"
_HOST_MEMORY = "the host ran out of memory: fewer workers, a smaller batch, or less offloading"
_SILENT_RANK = "a rank fell silent: look for the one that stopped first"

_GPUS = (
    rule(
        "verl-total-gpus",
        _K.INSUFFICIENT_RESOURCES,
        Role.CAUSE,
        r"Total available GPUs [\d.]+ is less than total desired GPUs [\d.]+",
        source="verl verl/single_controller/ray/base.py",
        seen_in="verl 0.9",
    ),
    rule(
        "verl-resource-pool",
        _K.INSUFFICIENT_RESOURCES,
        Role.CAUSE,
        r"Resource pool .{1,200}?: ?.{1,80}?cannot be satisfied in this ray cluster",
        source="verl#746",
        seen_in="verl of March to September 2025",
    ),
    rule(
        "verl-placement-group",
        _K.INSUFFICIENT_RESOURCES,
        Role.CAUSE,
        r"Cannot satisfy placement group requirement for pool",
        source="verl#6663",
        seen_in="verl, a pull request",
    ),
    rule(
        "nemo-rl-gpus",
        _K.INSUFFICIENT_RESOURCES,
        Role.CAUSE,
        r"Not enough GPUs available\. Requested \d+ GPUs, but only \d+ are available"
        r"|^(?:\S{1,80}\.)?ResourceInsufficientError: ",
        source="NeMo-RL#271",
        seen_in="NeMo-RL of April 2025",
    ),
    rule(
        "vllm-gpus",
        _K.INSUFFICIENT_RESOURCES,
        Role.CAUSE,
        r"number of required GPUs exceeds the total number of available GPUs",
        source="vllm#7107",
        seen_in="vLLM 0.5.3",
    ),
    rule(
        "vllm-placement-group",
        _K.INSUFFICIENT_RESOURCES,
        Role.CAUSE,
        r"Cannot provide a placement group of .{0,2000}? within \d+ seconds",
        source="vLLM vllm/executor/ray_utils.py",
        seen_in="vLLM of 2025",
    ),
    rule(
        "muster-fleet-room",
        _K.INSUFFICIENT_RESOURCES,
        Role.CAUSE,
        r"^FleetError: no room on the cluster for the fleet",
        source="tasks/rollout/ray_host.py",
        seen_in="any",
    ),
    rule(
        "skyrl-placement-group",
        _K.INSUFFICIENT_RESOURCES,
        Role.CAUSE,
        r"Failed to create placement group with",
        source="SkyRL get_ray_pg_ready_with_timeout",
        seen_in="SkyRL of 2025",
    ),
    rule(
        "areal-placement-group",
        _K.INSUFFICIENT_RESOURCES,
        Role.CAUSE,
        r"Ray placement group timeout",
        source="AReaL areal/launcher/ray.py",
        seen_in="AReaL of 2025",
    ),
    rule(
        "ray-job-start",
        _K.START_TIMEOUT,
        Role.CAUSE,
        r"Job supervisor actor failed to start within \d+",
        source="Ray python/ray/dashboard/modules/job/job_manager.py",
        seen_in="Ray 2.60",
    ),
)

_DEVICES = (
    rule(
        "nvidia-xid",
        _K.GPU_HARDWARE,
        Role.CAUSE,
        # Links report what they have mended by themselves with the word Nonfatal (gpud#1174).
        r"NVRM: Xid [^:\n]{0,40}(?::[^:\n]{0,40}){0,3}?: "
        r"(?:48|62|64|74|79|95|119|120|140|14[4-9]|150)\b(?!.{0,80}\bNonfatal\b)",
        hint=_BROKEN_GPU,
        source="facts/rl-stack.md",
        seen_in="NVIDIA drivers 570 to 590",
        at_any_level=True,
    ),
    rule(
        "gpu-ecc",
        _K.GPU_HARDWARE,
        Role.CAUSE,
        r"(?i:uncorrectable ECC error)|CUDA_ERROR_ECC_UNCORRECTABLE",
        hint=_BROKEN_GPU,
        source="trl#4149",
        seen_in="PyTorch of 2019 to 2025",
    ),
    rule(
        "gpu-lost",
        _K.GPU_HARDWARE,
        Role.CAUSE,
        r"fallen off the bus|GPU is lost\. +Reboot the system",
        hint=_BROKEN_GPU,
        source="NVSentinel#155",
        seen_in="NVIDIA driver 570.158",
        at_any_level=True,
    ),
    rule(
        "gpu-fabric",
        _K.GPU_HARDWARE,
        Role.CAUSE,
        r"Error 802: system not yet initialized|runtime error \(802\)",
        hint="NVIDIA's fabric manager is not running on the node, or not in the driver's version",
        source="pytorch#35710",
        seen_in="PyTorch of 2020 to 2026",
    ),
    rule(
        "node-lost",
        _K.NODE_LOST,
        Role.CAUSE,
        # Of a node that may yet "be marked as dead" Ray only warns.
        r"NodeDiedError|(?i:raylet died)|(?<!can be )marked (?:as )?dead\b"
        r"|The actor died because its (?:owner )?node has died"
        r"|Task failed because the node it was running on is dead"
        r"|[Nn]ode \S{1,200} (?:is|was marked) dead|DUE TO NODE FAILURE",
        hint="a node died: see the node's kernel log, and try without it",
        source="ray#58638",
        seen_in="Ray 2.0 to 2.60",
        at_any_level=True,
    ),
)

_MEMORY = (
    rule(
        "host-oom",
        _K.HOST_OOM,
        Role.CAUSE,
        r"Detected \d+ oom[-_ ]kill event|oom-kill:constraint="
        r"|\bOOMKilled\b|(?i:out of memory): Kill(?:ed)? process"
        r"|^srun: error: .{0,200}: Out Of Memory"
        r"|ray\.exceptions\.OutOfMemoryError|killed due to the node running low on memory"
        r"|killed due to memory pressure \(OOM\)",
        hint=_HOST_MEMORY,
        source="ray#30312",
        seen_in="Ray 2.2 to 2.60, Slurm and Linux of 2018 to 2026",
        at_any_level=True,
    ),
    rule(
        "host-memory-error",
        _K.HOST_OOM,
        Role.CAUSE,
        r"DefaultCPUAllocator: can't allocate memory|^(?:numpy\.\S{1,60})?_?(?:Array)?MemoryError\b"
        r"|Cannot allocate memory",
        hint=_HOST_MEMORY,
        source="PyTorch c10/core/impl/alloc_cpu.cpp",
        seen_in="any",
    ),
    rule(
        "shared-memory",
        _K.HOST_OOM,
        Role.CAUSE,
        r"killed by signal: Bus error|insufficient shared memory \(shm\)",
        hint="/dev/shm is too small: give the container more of it, or use fewer loader workers",
        source="mmsegmentation#1356",
        seen_in="PyTorch of 2018 to 2025",
    ),
    rule(
        "cuda-oom",
        _K.CUDA_OOM,
        Role.CAUSE,
        # A request for an impossible amount follows from a broken exchange (nccl#1284).
        r"CUDA out of memory(?!.{0,40}more than 1EB)|CUDA error: out of memory"
        r"|CUDA_ERROR_OUT_OF_MEMORY|NCCL WARN Cuda failure (?:\d+ )?'out of memory'"
        r"|^torch\.OutOfMemoryError: (?!CUDA)",
        hint=_GPU_MEMORY,
        source="slime#1951",
        seen_in="PyTorch of 2021 to 2026",
    ),
    rule(
        "kv-cache-memory",
        _K.CUDA_OOM,
        Role.CAUSE,
        r"No available memory for the cache blocks|larger than the (?:maximum number of tokens that"
        r" can be stored in|available) KV cache"
        r"|Not enough memory\. Please try to increase --mem-fraction-static",
        hint="the engine has no room for its KV cache: give it a larger fraction of the GPU, or"
        " shorter sequences",
        source="vllm#27508, OpenRLHF#336, sglang#4330",
        seen_in="vLLM 0.2 to 0.11, SGLang 0.1 to 0.5",
    ),
    rule(
        "gpu-memory-taken",
        _K.CUDA_OOM,
        Role.CAUSE,
        r"Free memory on device .{0,80}? on startup is less than desired GPU memory utilization",
        hint="something else holds memory of this GPU (see nvidia-smi), or the share is too high",
        source="vllm#20305",
        seen_in="vLLM 0.9",
    ),
)

_DISKS = (
    rule(
        "storage",
        _K.STORAGE,
        Role.CAUSE,
        r"No space left on device|Disk quota exceeded|Read-only file system"
        r"|Stale (?:NFS )?file handle|\[Errno 5\] Input/output error"
        r"|failed with Input/output error|ray\.exceptions\.OutOfDiskError",
        hint="a file system is full or gone: df -h and quota, then start again",
        source="LLaMA-Factory#5155, mmdetection#12069, errno(3)",
        seen_in="any",
    ),
    rule(
        "checkpoint-cut-short",
        _K.STORAGE,
        Role.ERROR,
        r"PytorchStreamWriter failed writing|unexpected pos \d+ vs \d+"
        r"|failed finding central directory|invalid header or archive is corrupted",
        hint="a checkpoint is cut short, often by a full disk: resume from the one before it",
        source="dddd_trainer#36, pytorch#170244",
        seen_in="PyTorch 1.6 to 2.10",
    ),
)

_NETWORK = (
    rule(
        "port-conflict",
        _K.PORT_CONFLICT,
        Role.CAUSE,
        r"(?i:address already in use)|EADDRINUSE|\b[Pp]ort \d+ is (?:already )?in use",
        hint="another process holds the port: use ${NAME.port} for a free one",
        source="verl#3521, errno(3)",
        seen_in="any",
    ),
    rule(
        "hub-offline",
        _K.USER_ERROR,
        Role.ERROR,
        r"outgoing traffic has been disabled|OfflineModeIsEnabled",
        hint="the model or data set is not in the cache, and HF_HUB_OFFLINE is set: fetch it first",
        source="huggingface_hub src/huggingface_hub/file_download.py",
        seen_in="huggingface_hub 2.4",
    ),
    rule(
        "wandb",
        _K.NETWORK,
        Role.ERROR,
        r"Run initialization has timed out after|^wandb\.(?:\S{1,60}\.)?errors\.\S{0,20}CommError",
        hint="Weights & Biases can't be reached: WANDB_MODE=offline, then wandb sync",
        source="wandb#10669",
        seen_in="wandb of 2023 to 2025",
    ),
    rule(
        "ray-head-lost",
        _K.NETWORK,
        Role.ERROR,
        r"Failed to connect to GCS (?:within|at address)|waiting for GCS to become available",
        hint="Ray's head can't be reached: is it up, and is the address right?",
        source="ray#34334",
        seen_in="Ray 2.0 to 2.60",
    ),
    rule(
        "network",
        _K.NETWORK,
        Role.ERROR,
        r"ConnectionRefusedError|Connection refused|ConnectionResetError|Connection reset by peer"
        r"|Temporary failure in name resolution|Name or service not known|No route to host"
        r"|Network is unreachable|Max retries exceeded with url|RemoteDisconnected"
        r"|Failed to establish a new connection|LocalEntryNotFoundError"
        r"|couldn't connect to 'https?:"
        r"|^(?:httpx|httpcore|aiohttp)\.(?:client_exceptions\.)?\w*(?:Connect|Timeout|Network)\w*"
        r"|^requests\.exceptions\.(?:ConnectionError|\w{0,20}Timeout|SSLError)"
        r"|All connection attempts failed|^(?:\S{1,80}\.)?HfHubHTTPError: (?:429|5\d\d)",
        hint="what it talks to is gone or was never there: see the other components' logs",
        source="trl#3214, huggingface_hub#1689, errno(3)",
        seen_in="any",
    ),
    rule(
        "rendezvous-timeout",
        _K.NETWORK,
        Role.CASCADE,
        r"client socket has (?:timed out after|failed to connect)",
        hint="the processes of the gang did not find each other: one died first, or an address"
        " (MASTER_ADDR, NCCL_SOCKET_IFNAME) is wrong",
        source="vllm#19670, trl#3736",
        seen_in="PyTorch 2.6, vLLM of June 2025",
    ),
    rule(
        "collective-timeout",
        _K.COLLECTIVE_TIMEOUT,
        Role.CASCADE,
        r"Watchdog caught collective operation timeout"
        r"|Some NCCL operations have failed or timed out|Heartbeat monitor timed out"
        r"|watchdog got stuck for|failure detected by watchdog"
        r"|[Ww]atchdog thread terminated with exception|Timeout at NCCL work|NCCL .{0,80}[Tt]imeout"
        r"|NCCL communicator was aborted|ProcessGroupNCCL.{0,80}aborted"
        r"|error or timeout\) detected by watchdog",
        hint=_SILENT_RANK,
        source="vllm#6042, torchtune#2093, DEIM#105",
        seen_in="PyTorch of 2024 and 2025",
    ),
    rule(
        "collective-error",
        _K.COLLECTIVE_TIMEOUT,
        Role.CASCADE,
        r"DistBackendError|ncclRemoteError|Connection closed by remote peer"
        r"|remote process exited or there was a network error|Socket recv failed while polling"
        r"|Connection closed by peer|connectFullMesh failed"
        r"|\bTCPStore\b.{0,200}(?:Broken pipe|recvValue)|reached monitoredBarrier, but"
        r"|DistStoreError|DistNetworkError|there are other ranks that didn't finish loading",
        hint=_SILENT_RANK,
        source="nccl#1235, OpenRLHF#621, sglang#4503, pytorch#75512",
        seen_in="PyTorch 1.11 to 2.5, NCCL 2.14 to 2.21",
    ),
)

MACHINES: tuple[Rule, ...] = (*_GPUS, *_DEVICES, *_MEMORY, *_DISKS, *_NETWORK)


_SEE_OTHERS = "see the log of the process that died, and dmesg on its node"

_USERS = (
    rule(
        "module-not-found",
        _K.USER_ERROR,
        Role.ERROR,
        r"ModuleNotFoundError: |ImportError: |\.so: undefined symbol: ",
        hint="a package is missing from the environment of this command, or is of another version",
        source="flash-attention#1612, Python",
        seen_in="any",
    ),
    rule(
        "file-not-found",
        _K.USER_ERROR,
        Role.ERROR,
        r"FileNotFoundError: |can't open file|IsADirectoryError: |NotADirectoryError: "
        r"|is not the path to a directory containing|: command not found$"
        r"|^(?:/bin/)?(?:ba|da)?sh: .{1,200}: (?:not found|No such file or directory)$",
        hint="a path is wrong: relative ones count from the component's cwd",
        source="verl#1763, Python",
        seen_in="any",
    ),
    rule(
        "permission",
        _K.USER_ERROR,
        Role.ERROR,
        r"PermissionError: |^(?:[^\s:]{1,200}: ){1,4}Permission denied$",
        hint="the user that runs this may not read, write or execute it there",
        source="Python",
        seen_in="any",
    ),
    rule(
        "hub-access",
        _K.USER_ERROR,
        Role.ERROR,
        r"GatedRepoError|Cannot access gated repo|trying to access a gated repo"
        r"|RepositoryNotFoundError|HFValidationError",
        hint="the model or data set is gated, private or misspelt: check its name and HF_TOKEN",
        source="trl#4282, trl#3604",
        seen_in="huggingface_hub of 2024 to 2026",
    ),
    rule(
        "usage",
        _K.USER_ERROR,
        Role.ERROR,
        r"^\S{1,200}\.py: error: |^\S{1,200}: error: (?:unrecognized arguments|argument "
        r"|the following arguments|invalid choice|ambiguous option)"
        r"|are not used by the HfArgumentParser|^Error: (?:No such option|Invalid value|Missing "
        r"(?:option|argument|command))",
        hint="the command line is not what the program expects: try it with --help",
        source="CoVo#1, open-instruct#620, argparse, click",
        seen_in="any",
    ),
    rule(
        "configuration",
        _K.USER_ERROR,
        Role.ERROR,
        r"\b(?:hydra|omegaconf)\.(?:core\.)?errors\.|ConfigCompositionException|ConfigAttributeError"
        r"|^Could not override '|^Key '.{1,120}' is not in struct|MissingMandatoryValue"
        r"|pydantic\S{0,60}ValidationError|^\d+ validation errors? for ",
        hint="the configuration has no such key, or not such a value: see the program's own",
        source="verl#4262, verl#1080",
        seen_in="Hydra 1.3, OmegaConf 2.3, pydantic 2",
    ),
    rule(
        "configuration-assert",
        _K.USER_ERROR,
        Role.ERROR,
        r"^AssertionError: .{0,300}?(?:divisible|multiple of|is not equal to|batch_size|must be |"
        r"should be |only support)",
        hint="numbers of the configuration don't fit together, most often batch sizes and GPUs",
        source="OpenRLHF#346, verl#3296, EasyR1#44",
        seen_in="DeepSpeed 0.9, Megatron-Core of 2024 and 2025",
    ),
    rule(
        "python-value",
        _K.USER_ERROR,
        Role.ERROR,
        # SGLang says so of ranks that wait for one that is lost (sglang#4503).
        r"^(?:Key|Type|Value|Attribute|Name|Syntax|Indentation)Error"
        r"(?:$|:(?! TP rank \d+ could finish))",
        source="facts/rl-stack.md",
        seen_in="any",
    ),
)

_RUNTIME = (
    rule(
        "non-finite-loss",
        _K.RUNTIME_ERROR,
        Role.ERROR,
        r"(?i)\bloss is (?:nan|inf)\b|found NaN in|non-finite (?:loss|grad)"
        r"|probability tensor contains either .inf|loss scale already at minimum",
        hint="training diverged: look at the learning rate and the data of that step",
        source="Pai-Megatron-Patch#680, DeepSpeedExamples#419, trl#229",
        seen_in="Megatron-Core of 2025, DeepSpeed of 2023, PyTorch of 2023 to 2025",
    ),
    rule(
        "device-assert",
        _K.RUNTIME_ERROR,
        Role.ERROR,
        r"device-side assert triggered|: block: \[\d+,\d+,\d+\], thread: .{1,40} Assertion ",
        hint="an index is out of range on the GPU, most often a token beyond the vocabulary:"
        " CUDA_LAUNCH_BLOCKING=1 names the line",
        source="trl#1995",
        seen_in="PyTorch of 2019 to 2024",
    ),
    rule(
        "cuda-error",
        _K.RUNTIME_ERROR,
        Role.ERROR,
        r"CUDA error: (?!out of memory|uncorrectable|device-side)|an illegal memory access was"
        r"|No CUDA GPUs are available|CUDNN_STATUS_\w+ERROR|CUBLAS_STATUS_(?!SUCCESS)\w+",
        hint="CUDA_LAUNCH_BLOCKING=1 names the line; on one node only, suspect its GPU",
        source="vllm#17098, flux#40, ray#33798",
        seen_in="PyTorch of 2023 to 2025",
    ),
    rule(
        "segfault",
        _K.RUNTIME_ERROR,
        Role.ERROR,
        # Not of an abort: that is how NCCL's watchdog ends its own process.
        r"Fatal Python error: (?:Segmentation fault|Bus error|Illegal instruction)"
        r"|SIGSEGV received at|Signal 11 \(SIGSEGV\) received|Segmentation fault \(core dumped\)"
        r"|Segfault encountered",
        hint="native code crashed: the stack above names it; look for mixed versions of CUDA",
        source="CPython faulthandler, pytorch torch/distributed/elastic",
        seen_in="any",
    ),
    rule(
        "exception",
        _K.RUNTIME_ERROR,
        Role.EXCEPTION,
        r"^(?!(?:\w+\.)*(?:CancelledError|KeyboardInterrupt))(?:[A-Za-z_]\w{0,60}\.){0,8}"
        r"(?:\w{1,80}Error|\w{0,80}Exception)(?:: |$)",
        source="Python",
        seen_in="any",
    ),
)

_CASCADES = (
    rule(
        "actor-died",
        _K.RUNTIME_ERROR,
        Role.CASCADE,
        r"ActorDiedError|RayActorError|ActorUnavailableError|The actor died unexpectedly"
        r"|A worker died or was killed while executing|WorkerCrashedError"
        r"|The actor is dead because",
        hint=_SEE_OTHERS,
        source="verl#4921",
        seen_in="Ray 2.0 to 2.60",
    ),
    rule(
        "engine-died",
        _K.RUNTIME_ERROR,
        Role.WRAPPER,
        r"EngineDeadError|Engine core initialization failed|EngineCore failed to start"
        r"|SIGQUIT received|[Rr]eceived sigquit from a child|scheduler is dead|See root cause above"
        r"|Engine process failed to start|WorkerProc initialization failed",
        hint="an inference engine died: the reason stands in its own lines, or in no log (dmesg)",
        source="vllm#17939, sglang#15235, sglang#4503",
        seen_in="vLLM 0.8 to 0.11, SGLang 0.4 to 0.5",
    ),
    rule(
        "sigkill",
        _K.UNKNOWN,
        Role.CASCADE,
        r"Signal 9 \(SIGKILL\) received|\(exitcode: -9\)|exitcode +: -9\b|<Signals\.SIGKILL: 9>"
        r"|^Killed$|: line \d+: +\d+ Killed\b|killed by signal: Killed|^Exit code: -9$"
        r"|exits with return code = -9\b",
        hint="SIGKILL comes from outside: the kernel's OOM killer (see dmesg) or a person",
        source="pytorch torch/distributed/elastic, CPPO#6, sglang#15235, DeepSpeed launch.py",
        seen_in="PyTorch of 2023 to 2025, SGLang 0.5.6, bash",
    ),
    rule(
        "child-failed",
        _K.RUNTIME_ERROR,
        Role.WRAPPER,
        r"ChildFailedError|\(exitcode: -?\d+\) local_rank: |CalledProcessError"
        r"|SignalException: Process \d+ got signal|ProcessExitedException|BrokenProcessPool"
        r"|DataLoader worker .{0,40}(?:exited unexpectedly|killed by signal: Terminated)",
        hint=_SEE_OTHERS,
        source="pytorch torch/distributed/elastic, Firefly#171",
        seen_in="PyTorch of 2023 to 2025",
    ),
    rule(
        "absurd-request",
        _K.RUNTIME_ERROR,
        Role.WRAPPER,
        r"Tried to allocate more than 1EB",
        hint="what came before it left nonsense in a tensor of sizes: look there",
        source="nccl#1284",
        seen_in="PyTorch of 2024",
    ),
    rule(
        "peer-gone",
        _K.RUNTIME_ERROR,
        Role.WRAPPER,
        r"^BrokenPipeError|^EOFError|^multiprocessing\.\S{1,60}Error",
        hint=_SEE_OTHERS,
        source="Python",
        seen_in="any",
    ),
)

_REST = (
    rule(
        "non-finite-metric",
        _K.RUNTIME_ERROR,
        Role.LAST,
        r"(?i)(?:\bloss|_loss|grad[_ ]norm)['\"]?\s?[:=]\s?nan\b",
        hint="training diverged: look at the learning rate and the data of that step",
        source="R1-V#69",
        seen_in="TRL of February 2025",
    ),
    rule(
        "traceback",
        _K.RUNTIME_ERROR,
        Role.LAST,
        r"^Traceback \(most recent call last\)",
        source="Python",
        seen_in="any",
    ),
)

PROGRAMS: tuple[Rule, ...] = (*_USERS, *_RUNTIME, *_CASCADES, *_REST)
