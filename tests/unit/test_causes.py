"""Tests of finding the cause of a failure in a log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tasks.record.causes import (
    RULES,
    Role,
    Rule,
    find_cause,
    last_lines,
    read_rules,
    read_since_step,
    read_tail,
)
from tasks.spec.failure_kinds import FailureKind

DATA = Path(__file__).parents[1] / "data"
FAILURES = sorted((DATA / "failures").glob("*.txt"))
SURVIVED = sorted((DATA / "survived").glob("*.txt"))

#: Mapping from the id of each rule to an example of a log line. Real programs printed these lines.
TEXTS = {
    "verl-total-gpus": "ValueError: Total available GPUs 8.0 is less than total desired GPUs 16",
    "verl-resource-pool": (
        "ValueError: Resource pool global_pool: 8*2cannot be satisfied in this ray cluster"
    ),
    "verl-placement-group": (
        "ValueError: Cannot satisfy placement group requirement for pool 'global_pool' requiring 8 "
        "GPUs and 24 CPUs on a single node. Max available on any single node: ..."
    ),
    "nemo-rl-gpus": (
        "ResourceInsufficientError: Not enough GPUs available. Requested 16 GPUs, but only 8 are "
        "available in the cluster."
    ),
    "vllm-gpus": (
        "ValueError: The number of required GPUs exceeds the total number of available GPUs in "
        "the placement group."
    ),
    "vllm-placement-group": (
        "ValueError: Cannot provide a placement group of placement_group_specs=[{'GPU': 1.0}] "
        "within 1800 seconds. See `ray status` to make sure the cluster has enough resources."
    ),
    "muster-fleet-room": (
        "FleetError: the Ray cluster had no room for the servers of the fleet within 300 s. The "
        "servers need 8 GPU, 1 CPU + 8 GPU, 1 CPU"
    ),
    "skyrl-placement-group": (
        "RuntimeError: Failed to create placement group with 2 bundles (requiring 8.0 GPUs, 8.0 "
        "CPUs total) in 180 seconds."
    ),
    "areal-placement-group": "TimeoutError: Ray placement group timeout after 30 s",
    "ray-job-start": "Job supervisor actor failed to start within 900 seconds.",
    "nvidia-xid": "[  812.4] NVRM: Xid (PCI:0000:4e:00): 79, pid=812, GPU has gone",
    "gpu-ecc": "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "gpu-lost": "GPU 0000:4e:00.0: GPU has fallen off the bus",
    "gpu-fabric": "RuntimeError: Unexpected error ... Error 802: system not yet initialized",
    "node-lost": "ray.exceptions.NodeDiedError: The node was lost",
    "host-oom": "slurmstepd: error: Detected 1 oom_kill event in StepId=812.0",
    "host-memory-error": "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory",
    "shared-memory": "RuntimeError: DataLoader worker (pid 8) is killed by signal: Bus error.",
    "cuda-oom": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."
    ),
    "kv-cache-memory": "ValueError: No available memory for the cache blocks. Try increasing ...",
    "gpu-memory-taken": (
        "ValueError: Free memory on device (3.22/4.0 GiB) on startup is less than desired GPU "
        "memory utilization (0.9, 3.6 GiB)."
    ),
    "storage": "OSError: [Errno 28] No space left on device: '/ckpt/step-10'",
    "checkpoint-cut-short": (
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central "
        "directory"
    ),
    "port-conflict": "OSError: [Errno 98] error while attempting to bind: Address already in use",
    "hub-offline": (
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in the "
        "disk cache and outgoing traffic has been disabled."
    ),
    "hub-unreachable": (
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't "
        "find them in the cached files."
    ),
    "wandb": "wandb.errors.CommError: Run initialization has timed out after 90.0 sec.",
    "ray-head-lost": "gcs_rpc_client.h:533: Failed to connect to GCS within 60 seconds.",
    "network": "ConnectionRefusedError: [Errno 111] Connection refused",
    "rendezvous-timeout": (
        "RuntimeError: The client socket has timed out after 600000ms while trying to connect to "
        "(10.0.0.9, 46229)."
    ),
    "collective-timeout": (
        "[rank3]:[E ProcessGroupNCCL.cpp:632] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=812, OpType=ALLREDUCE, Timeout(ms)=600000)"
    ),
    "collective-error": "torch.distributed.DistBackendError: NCCL error in: x.cpp:1275",
    "service-link": "ValueError: invalid literal for int() with base 10: 'tcp://10.0.0.1:80'",
    "relative-import": "ImportError: attempted relative import with no known parent package",
    "module-not-found": "ModuleNotFoundError: No module named 'flash_attn'",
    "start-module-not-found": "/srv/venv/bin/python: No module named lib.trian",
    "file-not-found": "python: can't open file '/srv/app/trian.py': [Errno 2] No such file",
    "interpreter-not-found": r"/usr/bin/env: 'python3\r': No such file or directory",
    "no-standard-input": "EOFError: EOF when reading a line",
    "debugger": "bdb.BdbQuit",
    "permission": "PermissionError: [Errno 13] Permission denied: '/data'",
    "hub-access": "huggingface_hub.errors.GatedRepoError: 401 Client Error.",
    "usage": "trainer.py: error: unrecognized arguments: --lr",
    "configuration": "hydra.errors.MissingConfigException: Cannot find primary config 'ppo'",
    "configuration-assert": (
        "AssertionError: only support equal chunk. Got size of DataProto 512 and chunk 6."
    ),
    "python-value": "KeyError: 'reward'",
    "non-finite-loss": "step 812: loss is nan, stopping",
    "device-assert": "RuntimeError: CUDA error: device-side assert triggered",
    "no-cuda-driver": (
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA "
        "GPU and installed a driver"
    ),
    "no-gpu-visible": "RuntimeError: No CUDA GPUs are available",
    "cuda-error": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "bus-error": "Fatal Python error: Bus error",
    "segfault": "Fatal Python error: Segmentation fault",
    "exception": "torch._dynamo.exc.BackendCompilerFailedException: inductor",
    "actor-died": "ray.exceptions.ActorDiedError: The actor died unexpectedly",
    "sigkill": "  traceback : Signal 9 (SIGKILL) received by PID 14750",
    "engine-died": "RuntimeError: Engine core initialization failed. See root cause above.",
    "child-failed": "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "absurd-request": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory"
    ),
    "peer-gone": "BrokenPipeError: [Errno 32] Broken pipe",
    "non-finite-metric": "{'loss': nan, 'grad_norm': 0.2, 'epoch': 0.1}",
    "traceback": "Traceback (most recent call last):",
}
#: Failure kinds that the queue, the flow and the supervisor recognise without reading a log.
OUR_OWN_KINDS = {
    "INFEASIBLE",
    "NOT_READY",
    "STALLED",
    "TIME_LIMIT",
    "FLEET_LOST",
    "LOST_CONTACT",
    "ALARM",
}


def header_and_log(path: Path) -> tuple[dict[str, str], str]:
    """Return the header of a stored log as a dict, and the log without its header."""
    head, _, log = path.read_text(encoding="utf-8").partition("\n---\n")
    return dict(line.split(": ", 1) for line in head.splitlines()), log


def rule_of(text: str) -> str | None:
    """Return the id of the rule that explains a log, or None."""
    cause = find_cause(text)
    return cause.rule.id if cause else None


def traceback(error: str, mark: str = "") -> str:
    """Return a Python traceback that ends with `error`. Each line begins with `mark`."""
    lines = ("Traceback (most recent call last):", '  File "train.py", line 8, in run', error)
    return "".join(f"{mark}{line}\n" for line in lines)


def steps(first: int, last: int) -> str:
    """Return the log lines of the training steps from `first` to `last`."""
    return "".join(f"step:{i} - actor/pg_loss:0.1\n" for i in range(first, last + 1))


OOM = TEXTS["cuda-oom"]


def test_every_rule_has_an_example() -> None:
    assert sorted(TEXTS) == sorted(rule.id for rule in RULES)
    assert len({rule.id for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    "fault",
    [
        'kind = "NO_KIND"',
        'role = "NO_ROLE"',
        "patterns = ['(']",
        "patterns = 'not a list'",
        'hnit = "misspelt"',
        "source = 1",
    ],
)
def test_invalid_rule_is_named(fault: str) -> None:
    row = {
        "kind": '"NETWORK"',
        "role": '"CAUSE"',
        "patterns": "['x']",
        "source": '"s"',
        "seen_in": '"any"',
    }
    key, _, value = fault.partition(" = ")
    lines = [f"{key} = {value}" for key, value in {**row, key: value}.items()]

    with pytest.raises(ValueError, match="cause rule licence"):
        read_rules("\n".join(["[licence]", *lines]))


def test_every_rule_has_a_source_and_every_cause_a_hint() -> None:
    assert [rule.id for rule in RULES if not rule.source or not rule.seen_in] == []
    # Only two groups of rules have no hint: rules whose failure kind makes Muster requeue the run,
    # and rules that match Python errors of any kind.
    without_hint = {rule.id for rule in RULES if not rule.hint}
    requeued = {r.id for r in RULES if r.kind in ("INSUFFICIENT_RESOURCES", "START_TIMEOUT")}
    assert without_hint - requeued == {"python-value", "exception", "traceback"}


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if re.search("CUDA|NCCL", rule.hint)], ids=lambda rule: rule.id
)
def test_advice_on_cuda_is_only_for_messages_about_gpus(rule: Rule) -> None:
    # A hint about CUDA would be wrong for a training on the CPU. So only rules that match messages
    # about GPUs may have a hint about CUDA.
    assert re.search("cuda|nccl|nvidia", TEXTS[rule.id], re.IGNORECASE)


def test_every_kind_found_in_logs_has_a_rule() -> None:
    kinds = {rule.kind.value for rule in RULES}

    assert {kind.value for kind in FailureKind} - kinds == OUR_OWN_KINDS


@pytest.mark.parametrize("rule", TEXTS)
def test_example_is_recognised_among_other_lines(rule: str) -> None:
    cause = find_cause(f"INFO starting\nstep 1 loss 0.5\n{TEXTS[rule]}\nINFO leaving\n")

    assert cause is not None and cause.rule.id == rule
    assert cause.line == TEXTS[rule].strip()


def test_advice_about_a_relative_import_names_the_option_m() -> None:
    cause = find_cause(TEXTS["relative-import"])

    assert cause is not None
    assert "-m PACKAGE.MODULE" in cause.rule.hint
    assert "Install" not in cause.rule.hint


@pytest.mark.parametrize("number", [48, 62, 64, 74, 79, 95, 119, 120, 140, *range(144, 151)])
def test_xids_of_broken_gpus_are_recognised(number: int) -> None:
    assert rule_of(f"kernel: NVRM: Xid (PCI:0000:4e:00): {number}, pid=812, name=x") == "nvidia-xid"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        # verl prints `0` if no GPU is available, and a float such as `8.0` otherwise.
        ("Total available GPUs 0 is less than total desired GPUs 8", "INSUFFICIENT_RESOURCES"),
        ("Resource pool a: 8*2 cannot be satisfied in this ray cluster", "INSUFFICIENT_RESOURCES"),
        ("raylet died", "NODE_LOST"),
        ("The node has been marked dead", "NODE_LOST"),
        ("OSError: [Errno 116] Stale file handle", "STORAGE"),
        ("socket.gaierror: [Errno -3] Temporary failure in name resolution", "NETWORK"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", "NETWORK"),
        ("FileNotFoundError: [Errno 2] No such file: 'x'", "USER_ERROR"),
        ("python3.11: No module named trian", "USER_ERROR"),
        (
            "[rank0]: /usr/bin/python3: No module named lib.__main__; 'lib' is a package",
            "USER_ERROR",
        ),
        ("/a b/bin/python: No module named trian", "USER_ERROR"),
        ("omegaconf.errors.ConfigKeyError: Key 'x' not in 'y'", "USER_ERROR"),
        ("TypeError: f() got an unexpected keyword argument 'x'", "USER_ERROR"),
        ("ZeroDivisionError: division by zero", "RUNTIME_ERROR"),
        ("StopIteration", "RUNTIME_ERROR"),
        ("Accelerate CLI tool: error: unrecognized arguments: --num_proces", "USER_ERROR"),
        ("ExceptionGroup: two tasks failed (2 sub-exceptions)", "RUNTIME_ERROR"),
        ("AssertionError: Torch not compiled with CUDA enabled", "USER_ERROR"),
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file", "USER_ERROR"),
        ("ValueError: Your setup doesn't support bf16/gpu.", "RUNTIME_ERROR"),
        ("RuntimeError: CUDA error: no CUDA-capable device is detected", "RUNTIME_ERROR"),
        ("RuntimeError: CUDA error: invalid device ordinal", "RUNTIME_ERROR"),
        ("ConnectionError: Couldn't reach 'a/b' on the Hub (LocalEntryNotFoundError)", "NETWORK"),
        # Messages of shells and launchers about a program that could not start or was killed.
        ("bash: torchrun: command not found", "USER_ERROR"),
        ("/bin/sh: 1: ./train.sh: Permission denied", "USER_ERROR"),
        ("Error: No such option: --lr", "USER_ERROR"),
        ("reason: OOMKilled", "HOST_OOM"),
        ("[2026-01-01] [ERROR] [launch.py:321] x exits with return code = -9", "UNKNOWN"),
    ],
)
def test_documented_messages_have_the_right_kind(text: str, kind: str) -> None:
    cause = find_cause(text)

    assert cause is not None and cause.rule.kind.value == kind


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        # messages of PyTorch for AMD GPUs, and of JAX
        ("RuntimeError: No HIP GPUs are available", "no-gpu-visible"),
        (
            "RuntimeError: Unable to initialize backend 'cuda': No visible GPU devices",
            "no-gpu-visible",
        ),
        ("RuntimeError: Error 803: system has unsupported display driver", "no-cuda-driver"),
        ("RuntimeError: Found no NVIDIA driver on your system.", "no-cuda-driver"),
    ],
)
def test_missing_gpu_or_driver_has_its_own_rule(text: str, rule: str) -> None:
    assert rule_of(text) == rule


@pytest.mark.parametrize("path", FAILURES, ids=lambda path: path.stem)
def test_cause_of_a_public_log_is_found(path: Path) -> None:
    expected, log = header_and_log(path)

    cause = find_cause(log)

    assert cause is not None
    assert (cause.rule.kind.value, cause.rule.id) == (expected["kind"], expected["rule"])


def test_there_are_enough_logs_of_public_issues() -> None:
    assert len(FAILURES) >= 40
    assert all("#" in header_and_log(path)[0]["source"] for path in FAILURES)


@pytest.mark.parametrize("path", SURVIVED, ids=lambda path: path.stem)
def test_survived_errors_are_not_a_cause(path: Path) -> None:
    assert find_cause(header_and_log(path)[1]) is None


@pytest.mark.parametrize(
    ("cause", "symptom"),
    [
        # One rank fails, for example because its memory is full. The other ranks wait for this rank
        # until their time-out. In each pair, the first rule matches the cause.
        ("cuda-oom", "collective-timeout"),
        ("nvidia-xid", "collective-timeout"),
        ("host-oom", "network"),
        ("node-lost", "collective-timeout"),
        ("storage", "python-value"),
        ("hub-unreachable", "network"),
        ("network", "collective-timeout"),
        ("module-not-found", "traceback"),
        ("verl-total-gpus", "python-value"),
        ("cuda-oom", "traceback"),
        # One rank fails because of a bug, and the other ranks report a network failure. The bug is
        # the cause.
        ("exception", "collective-timeout"),
        ("python-value", "collective-error"),
        ("device-assert", "collective-timeout"),
        ("segfault", "collective-error"),
        ("segfault", "actor-died"),
        # One process reports its own error, which is the cause. The other processes report only the
        # end of this process. In each pair, the first rule matches the cause.
        ("cuda-oom", "engine-died"),
        ("host-oom", "sigkill"),
        ("host-oom", "actor-died"),
        ("kv-cache-memory", "engine-died"),
        ("configuration-assert", "child-failed"),
        ("storage", "peer-gone"),
        ("port-conflict", "rendezvous-timeout"),
        # The log contains two error messages. Both are only consequences of an unknown failure. In
        # each pair, the first rule matches the more specific message, so this rule is reported.
        ("collective-timeout", "child-failed"),
        ("sigkill", "engine-died"),
        ("collective-timeout", "absurd-request"),
    ],
)
@pytest.mark.parametrize("first", ["cause", "symptom"])
def test_cause_wins_over_its_symptom_in_any_order(cause: str, symptom: str, first: str) -> None:
    lines = [TEXTS[cause], TEXTS[symptom]]
    text = "\n".join(lines if first == "cause" else reversed(lines))

    assert rule_of(text) == cause


@pytest.mark.parametrize(
    ("first", "second"),
    [("cuda-oom", "storage"), ("storage", "cuda-oom"), ("host-oom", "node-lost")],
)
def test_first_of_two_causes_wins(first: str, second: str) -> None:
    assert rule_of(f"{TEXTS[first]}\n{TEXTS[second]}\n") == first


def test_cause_in_a_public_log_is_not_hidden_by_the_cascade_of_another() -> None:
    role = {rule.id: rule.role for rule in RULES}
    logs = [(path.stem, *header_and_log(path)) for path in FAILURES]
    causes = [
        (name, head["rule"], log) for name, head, log in logs if role[head["rule"]] < Role.CASCADE
    ]
    noise = [log for _, head, log in logs if role[head["rule"]] >= Role.CASCADE]
    noise += [header_and_log(path)[1] for path in SURVIVED]

    hidden = {
        name
        for name, rule, log in causes
        for other in noise
        for text in (log + other, other + log)
        if rule_of(text) != rule
    }

    assert hidden == set()


def test_cause_of_one_rank_is_found_among_lines_of_other_ranks() -> None:
    others = "".join(
        f"[rank{i}]: torch.distributed.DistBackendError: NCCL error\n" for i in range(8)
    )
    oom = traceback(OOM, mark="[rank3]: ").splitlines(keepends=True)
    lines_of_others = others.splitlines(keepends=True)

    mixed = (
        "".join(line for pair in zip(lines_of_others, oom, strict=False) for line in pair) + others
    )

    assert rule_of(mixed) == "cuda-oom"


def test_collective_error_wins_over_errors_that_follow_from_it() -> None:
    text = traceback(TEXTS["collective-error"])
    text += "\nDuring handling of the above exception, another exception occurred:\n\n"
    text += traceback("RuntimeError: the training step failed")

    assert rule_of(text) == "collective-error"


def test_first_error_of_a_traceback_chain_wins() -> None:
    text = traceback("ConnectionRefusedError: [Errno 111] Connection refused")
    text += "\nThe above exception was the direct cause of the following exception:\n\n"
    text += traceback("ValueError: no server")

    assert rule_of(text) == "network"


def test_last_unchained_traceback_of_a_process_wins() -> None:
    text = traceback("ConnectionResetError: no metrics today") + "going on without metrics\n"

    assert rule_of(text + traceback("KeyError: 'reward'")) == "python-value"


def test_cause_logged_before_another_traceback_wins() -> None:
    assert rule_of(traceback(OOM) + traceback("RuntimeError: worker failed")) == "cuda-oom"


def test_first_traceback_of_several_processes_wins() -> None:
    text = traceback("KeyError: 'reward'", mark="(Worker pid=7) ")

    assert rule_of(text + traceback("ConnectionResetError: peer", "(Worker pid=8) ")) == (
        "python-value"
    )


def test_error_followed_by_training_steps_is_not_a_cause() -> None:
    assert rule_of(steps(1, 10) + traceback(OOM) + steps(11, 20)) is None
    text = steps(1, 10) + traceback(OOM) + steps(11, 20) + TEXTS["collective-timeout"]
    assert rule_of(text) == "collective-timeout"


def test_progress_bar_counts_as_training_steps() -> None:
    bar = "\r".join(f"  6%|▋         | {i}/1398 [1:31:02<25:44:02, 70.72s/it]" for i in range(9))

    assert rule_of(traceback(OOM) + bar) is None


@pytest.mark.parametrize(
    "progress",
    [
        # A few further steps do not prove that the training survived the error. An asynchronous
        # trainer still trains with the batches that are already in its queue.
        pytest.param(steps(11, 13), id="few-steps"),
        # Progress bars of inference and of loading also move while the trainer does not train.
        pytest.param(
            "".join(f"Rollout generation: {i}%|█  | {i}/99 [0:10<0:20]\r" for i in range(50)),
            id="other-bars",
        ),
        # After the error, the program was restarted. The output of the new program, such as the
        # loaded step, does not prove that the old program survived the error.
        pytest.param("restarting\nloading step 3\nepoch 1\n", id="restart"),
    ],
)
def test_other_output_does_not_prove_survival(progress: str) -> None:
    assert rule_of(steps(1, 10) + traceback(OOM) + progress) == "cuda-oom"


@pytest.mark.parametrize(
    "before",
    [
        "Exception ignored in: <function Pool.__del__ at 0x7f>",
        "Task exception was never retrieved",
        "--- Logging error ---",
        "ERROR:    Exception in ASGI application",
    ],
)
def test_caught_error_counts_only_as_a_fallback(before: str) -> None:
    caught = f"{before}\n{traceback(OOM)}"

    assert rule_of(caught) == "cuda-oom"
    assert rule_of(caught + traceback("KeyError: 'reward'")) == "python-value"
    assert rule_of(caught + TEXTS["collective-timeout"]) == "cuda-oom"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 812 loss 0.31 grad_norm 1.2",
        "INFO: 127.0.0.1 - GET /health HTTP/1.1 200 OK",
        # These lines contain words of error messages, but report no error.
        "inference server ready, nanoseconds per token 31",
        "NVRM: Xid (PCI:0000:4e:00): 31, pid=812",
        "    raise KeyError(key)",
        "loss information follows",
        "NCCL_DEBUG=INFO NCCL_TIMEOUT=1800 TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
        "'oom_score_adj': 500, 'on_oom': 'abort', 'max_retries': 3",
        "config: {'nccl_timeout': 600, 'early_stop_loss': inf, 'resume_mode': 'auto'}",
        "number of nan iterations: 0 | number of skipped iterations: 0",
        "0 errors, 0 failures, 0 exceptions",
        "Volatile Uncorr. ECC |   0 |   N/A",
        "srun: error: node7: task 0: Exited with exit code 1",
        "Error: see above",
        # These lines report an error after which the program tried again or used another value. So
        # the error did not end the program.
        "ERROR client: Connection refused, retrying in 2 s",
        "Port 29500 is already in use, trying port 29501 instead.",
        "retrying after timeout: read timed out (3/10)",
        "CUDA out of memory at batch size 64, falling back to 32",
        # The log level of these lines is lower than ERROR. The lines have the formats of several
        # loggers.
        "WARNING 05-05 12:00:00 [cuda.py:12] CUDA out of memory in the probe run",
        "2026-01-01 00:00:00,120 - INFO - client - ConnectionResetError: peer",
        "[W1107 10:04:31.990 socket.cpp:464] [c10d] Address already in use",
        "[2026-01-01 00:00:00,120] [INFO] [io.py:8:save] No space left on device: other disk",
        "/lib/a.py:46: ResourceWarning: ConnectionResetError: peer",
        "+ echo 'No space left on device'",
        # Ray prints a list of possible reasons after the death of an actor. The list does not show
        # the actual reason.
        "Some common causes include: (1) the process was killed by the OOM killer",
    ],
)
def test_usual_output_is_not_a_cause(line: str) -> None:
    assert find_cause(line) is None


def test_code_lines_of_a_traceback_are_ignored() -> None:
    text = traceback("ZeroDivisionError: division by zero").replace(
        "in run\n", "in run\n    raise OSError('No space left on device')\n"
    )

    assert rule_of(text) == "exception"


@pytest.mark.parametrize(
    "mark",
    [
        "[rank0]: ",
        "(TaskRunner pid=8051, ip=10.0.0.2) ",
        "\x1b[36m(WorkerDict pid=812)\x1b[0m ",
        "ERROR 06-30 13:53:19 [core.py:515] ",
        "(EngineCore_DP0 pid=17374) ERROR 09-28 15:47:24 [core.py:718] ",
        "2023-12-27 11:25:36 | ERROR | stderr | ",
        "[2025-03-17 17:15:55 TP1] ",
        "2025-04-01T05:53:13.120Z ",
        "node1: [rank0]: ",
        "0: ",
        "trainer-1  | ",
    ],
)
def test_line_prefixes_are_skipped(mark: str) -> None:
    cause = find_cause(traceback("KeyError: 'reward'", mark))

    assert cause is not None and cause.rule.id == "python-value"


def test_long_line_is_cut_around_the_match() -> None:
    cause = find_cause("x" * 10_000 + " No space left on device " + "y" * 10_000)

    assert cause is not None and "No space left on device" in cause.line
    assert len(cause.line) <= 500


@pytest.mark.parametrize(
    "unit",
    [
        "x", "1", " ", "[", "(pid=", "- ", "a.", "_", "\r", "ab\r", "abcdef\n", "Error",
        "a: error: ",
        "Resource pool a: ", "NVRM: Xid :", "Free memory on device ", "TCPStore ", "out of memory",
        "Cannot provide a placement group of ", "Connection refused ", "AssertionError: ",
        "Traceback (most recent call last):\n", "step 1\nstep 2\n", "│ Error: \n", "Retrying\n",
    ],
)  # fmt: skip
@pytest.mark.timeout(60)  # usually 0.5 s, but minutes with a regular expression that backtracks
def test_matching_time_is_linear(unit: str) -> None:
    find_cause(unit * (200_000 // len(unit)))


def test_roles_are_ordered_by_priority() -> None:
    assert list(Role) == [
        Role.CAUSE,
        Role.ERROR,
        Role.EXCEPTION,
        Role.CASCADE,
        Role.WRAPPER,
        Role.LAST,
    ]


def test_last_lines_skip_blank_lines() -> None:
    text = "".join(f"line {i}\n\n" for i in range(30)) + "x" * 1000 + "\n  \n"

    assert last_lines(text, count=3, line_length=5).split("\n") == ["line ", "line ", "xxxxx"]


def test_tail_of_a_log_may_contain_any_bytes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff" * 100 + b"\xc3end")

    assert read_tail(log, limit_bytes=4) == "\ufffdend"
    assert read_tail(log).endswith("end")
    assert read_tail(tmp_path / "none") == ""
    assert read_tail(tmp_path) == ""


OOM_OF_RANK = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def traces(ranks: int = 128, frames: int = 100) -> str:
    """Return the output of the NCCL watchdogs of a gang: about 10 kB for each rank."""
    return "".join(
        f"[rank{rank}]:[E1123 11:17:52.1 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE)\n"
        + "".join(
            f"frame #{i}: c10d::ProcessGroupNCCL::watchdogHandler() + 0x{i * rank:x} "
            "(0x7f3b5c in /usr/lib/libtorch_cuda.so)\n"
            for i in range(frames)
        )
        for rank in range(ranks)
    )


#: Test cases: mapping from the name of the case to the content of a log and the expected cause.
LONG = {
    "megabytes of consequences": (steps(1, 9) + f"{OOM_OF_RANK}\n" + traces(), "cuda-oom"),
    "output of other ranks before the error": (
        steps(1, 9)
        + "".join(f"sample {i:x}\n" for i in range(30_000))
        + f"{OOM_OF_RANK}\n"
        + traces(),
        "cuda-oom",
    ),
    "no training step": (f"{OOM_OF_RANK}\n" + traces(), "cuda-oom"),
    "survived error": (f"{OOM_OF_RANK}\n" + steps(1, 9) + traces(), "collective-timeout"),
    "survived error far from the end": (
        f"{OOM_OF_RANK}\n" + steps(1, 9) + "x\n" * 200_000 + "KeyError: 'a'\n",
        "python-value",
    ),
    "no training step, and an error at the end": (
        f"{OOM_OF_RANK}\n" + "x\n" * 200_000 + "KeyError: 'a'\n",
        "python-value",
    ),
}


@pytest.mark.parametrize("case", LONG)
def test_log_is_read_from_the_last_steps(case: str, tmp_path: Path) -> None:
    text, rule = LONG[case]
    log = tmp_path / "log"
    log.write_text(text)

    cause = find_cause(read_since_step(log))

    assert cause is not None and cause.rule.id == rule


def test_lines_before_the_known_steps_are_not_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"{OOM_OF_RANK}\n" + traces())

    cause = find_cause(read_since_step(log, since=len(OOM_OF_RANK) + 1))

    assert cause is not None and cause.rule.id == "collective-timeout"


def test_lines_after_the_limit_are_not_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("KeyError: 'a'\nbye")

    assert read_since_step(log, until=13) == "KeyError: 'a'"
    assert read_since_step(tmp_path / "none") == read_since_step(tmp_path) == ""


@pytest.mark.parametrize("unit", ["x", "\r", "step", "step 1\r", "abcdef\n", "y\n", "\n"])
@pytest.mark.timeout(60)
def test_long_log_is_read_in_linear_time(unit: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(unit * (500_000 // len(unit)) + traces(1))

    read_since_step(log)


def test_tail_of_a_log_shows_only_the_last_state_of_a_progress_bar() -> None:
    states = [
        f"Epoch 1:  {step}%|{'#' * step}   | {step}/20 [00:01<00:02, 3.1it/s]" for step in range(9)
    ]
    other_bar = "Loading shards: 100% Completed | 4/4 [00:02<00:00]"
    text = "start\n" + "\r".join(states) + f"\n{other_bar}\nRuntimeError: boom\n"

    tail = last_lines(text)

    assert tail.splitlines() == ["start", states[-1], other_bar, "RuntimeError: boom"]
