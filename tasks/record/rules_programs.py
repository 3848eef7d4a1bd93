"""Rules for what programs say of their own faults, and of those of the person who started them."""

from __future__ import annotations

from tasks.record.cause_rules import Role, Rule, rule
from tasks.spec.failure_kinds import FailureKind as _K

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
