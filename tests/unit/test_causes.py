"""Causes of failure are recognised by the texts that programs leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.run.causes import RULES, find_cause, last_error, last_lines, read_tail

#: `rule -> a line as its program writes it`.
TEXTS = {
    "verl-total-gpus": ("ValueError: Total available GPUs 8.0 is less than total desired GPUs 16"),
    "verl-resource-pool": (
        "ValueError: Resource pool global_pool: 8*2cannot be satisfied in this ray cluster"
    ),
    "verl-placement-group": (
        "ValueError: Cannot satisfy placement group requirement for pool global_pool"
    ),
    "nemo-rl-gpus": (
        "ResourceInsufficientError: Not enough GPUs available. Requested 16 GPUs, but only 8 are "
        "available in the cluster."
    ),
    "vllm-gpus": (
        "ValueError: The number of required GPUs exceeds the total number of available GPUs in "
        "the placement group."
    ),
    "skyrl-placement-group": "RuntimeError: Failed to create placement group with 2 bundles",
    "areal-placement-group": "TimeoutError: Ray placement group timeout after 30 s",
    "ray-job-start": "Job supervisor actor failed to start within 900 seconds.",
    "nvidia-xid": "[  812.4] NVRM: Xid (PCI:0000:4e:00): 79, pid=812, GPU has gone",
    "gpu-ecc": "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "node-lost": "ray.exceptions.NodeDiedError: The node was lost",
    "host-oom": "slurmstepd: error: Detected 1 oom_kill event in StepId=812.0",
    "cuda-oom": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."
    ),
    "storage": "OSError: [Errno 28] No space left on device: '/ckpt/step-10'",
    "port-conflict": "OSError: [Errno 98] error while attempting to bind: Address already in use",
    "module-not-found": "ModuleNotFoundError: No module named 'flash_attn'",
    "file-not-found": "python: can't open file '/work/trian.py': [Errno 2] No such file",
    "permission": "PermissionError: [Errno 13] Permission denied: '/data'",
    "usage": "trainer.py: error: unrecognized arguments: --lr",
    "configuration": "hydra.errors.MissingConfigException: Cannot find primary config 'ppo'",
    "non-finite-loss": "step 812: loss is nan, stopping",
    "network": "ConnectionRefusedError: [Errno 111] Connection refused",
    "python-value": "KeyError: 'reward'",
    "collective-timeout": (
        "[rank3]:[E ProcessGroupNCCL.cpp:632] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=812, OpType=ALLREDUCE, Timeout(ms)=600000)"
    ),
    "traceback": "Traceback (most recent call last):",
}


def test_every_rule_has_its_text() -> None:
    assert list(TEXTS) == [rule.id for rule in RULES]


@pytest.mark.parametrize("rule", TEXTS)
def test_text_is_recognised_among_others(rule: str) -> None:
    text = f"INFO starting\nstep 1 loss 0.5\n  {TEXTS[rule]}\nINFO leaving\n"
    # What begins a line does so without an indent.
    text = text.replace("\n  ", "\n")

    cause = find_cause(text)

    assert cause is not None and cause.rule.id == rule
    assert cause.line == TEXTS[rule]


@pytest.mark.parametrize(
    ("cause", "symptom"),
    [
        # A rank that ran out of memory leaves the others waiting.
        ("cuda-oom", "collective-timeout"),
        ("nvidia-xid", "collective-timeout"),
        ("host-oom", "network"),
        ("node-lost", "collective-timeout"),
        ("storage", "python-value"),
        ("network", "collective-timeout"),
        ("module-not-found", "traceback"),
        ("verl-total-gpus", "python-value"),
        ("cuda-oom", "traceback"),
    ],
)
@pytest.mark.parametrize("first", ["cause", "symptom"])
def test_cause_is_found_wherever_its_symptom_stands(cause: str, symptom: str, first: str) -> None:
    lines = [TEXTS[cause], TEXTS[symptom]]
    text = "\n".join(lines if first == "cause" else reversed(lines))

    found = find_cause(text)

    assert found is not None and found.rule.id == cause


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 812 loss 0.31 grad_norm 1.2",
        "INFO: 127.0.0.1 - GET /health HTTP/1.1 200 OK",
        # Words that merely resemble.
        "inference server ready, nanoseconds per token 31",
        "NVRM: Xid (PCI:0000:4e:00): 31, pid=812",
        "    raise KeyError(key)",
        "loss information follows",
    ],
)
def test_usual_output_is_no_cause(line: str) -> None:
    assert find_cause(line) is None


def test_last_lines_are_those_that_say_something() -> None:
    text = "".join(f"line {i}\n\n" for i in range(30)) + "x" * 1000 + "\n  \n"

    assert last_lines(text, count=3, line_length=5).split("\n") == ["line ", "line ", "xxxxx"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Traceback ...\n  File x\nKeyError: 'a'\nbye\n", "KeyError: 'a'"),
        ("torch.cuda.CudaError: boom\nlater ValueError: 2", "torch.cuda.CudaError: boom"),
        ("all is well", ""),
        ("", ""),
    ],
)
def test_last_error_is_the_line_a_traceback_ends_with(text: str, error: str) -> None:
    assert last_error(text) == error


def test_tail_of_a_log_is_its_end_whatever_bytes_it_holds(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff" * 100 + b"\xc3end")

    assert read_tail(log, limit_bytes=4) == "\ufffdend"
    assert read_tail(log).endswith("end")
    assert read_tail(tmp_path / "none") == ""
    assert read_tail(tmp_path) == ""
