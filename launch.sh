#!/usr/bin/env bash
# The one door: sets up the environment, chooses ranks and backend, and runs torchrun.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
    cat <<'TEXT'
Learn
./launch.sh zero1|zero2|zero3 [N] [options]  a chapter: a few steps, then the trace of one
./launch.sh articles [options]          the articles' claims, each run or added up here
./launch.sh notebooks [options]         Jupyter Lab; --html [FOLDER]: executed copies, to read only
./launch.sh exercise NAME [--hints 1]   exercises/NAME.py with blanks, or a task
./launch.sh check NAME [N] [--hint]     of an exercise, step by step: passed, or expected and found
./launch.sh bug [NUMBER [N]] [--clue]   the museum of bugs: one (--hint, --answer), or the list

Run and measure
./launch.sh compare [N] [options]       the referee: one GPT under DDP, our stages and torch's own
./launch.sh train STAGE [N] [options]   a training run that goes on after a rank dies or hangs
./launch.sh memory [N] [options]        what each engine holds, needs, sends at 7B; needs no GPU
./launch.sh bench [N] [options]         step times side by side; --sweeps, --host, --ratios FILE...
./launch.sh conform [ENGINE|FILE.py ...] [N]  who trains right, who refuses, who is silently wrong
./launch.sh report [FOLDER] [--minutes M]  what this machine shows, on a page, within M minutes (10)
./launch.sh docs [--check]              writes tables and figures of the pages, out of results/
./launch.sh test [options]              the tests; options are pytest's, paths the project's
./launch.sh help                        this text; COMMAND --help lists the options of a command
Extras: ./launch.sh watch (a step as a page for a browser), ./launch.sh plan (step times elsewhere)
and ./launch.sh test --simulated-gpus N (the GPU path without a GPU)

Without a command: compare. Without N: a rank per GPU over NCCL, or two over gloo.
Paths begin where you stand. Variables: PYTHON (used as it is, nothing is installed), NNODES,
NODE_RANK and RDZV_ENDPOINT=host:port (several machines; N is then the ranks of each),
OMP_NUM_THREADS (default 1), ZERO_TIMEOUT (seconds in which all ranks must join a collective: 120).
TEXT
}

fail() {
    echo "launch.sh: $*" >&2
    exit 2
}

# Everything that can be refused is refused before anything is installed.
command=${1-compare}
[ $# -gt 0 ] && shift
module= own=() ranked=yes html= # what Python is given before the options, and whether by torchrun
commands=(zero1 zero2 zero3 articles notebooks exercise check bug compare train memory bench conform report docs
    test help watch plan)
case "$command" in
help | -h | --help) usage && exit 0 ;;
compare) module=fsdp2_compare ;;
train)
    case "${1:-}" in
    zero1 | zero2 | zero3) ;;
    -h | --help) set -- zero3 --help ;;
    *) fail "train needs a stage, zero1, zero2 or zero3, as in: ./launch.sh train zero3 2; got '${1:-}'" ;;
    esac
    module=zerolab.run.train own=("$1")
    shift
    ;;
zero1 | zero2 | zero3) module=zerolab.measure.walkthrough own=("$command") ;;
bench) module=zerolab.measure.bench ;;
memory | report) module=zerolab.measure.$command ranked= ;; # a report starts its ranks itself, as they may hang or die
bug) module=zerolab.teach.museum ranked= ;; # and so do this, check, conform and watch
plan) module=extra.planner ranked= ;;
watch) module=extra.watch ranked= ;;
conform) module=tests.conformance.command ranked= ;;
sweeps) fail "sweeps is an option now: ./launch.sh bench --sweeps" ;;
ratios) fail "ratios is an option now: ./launch.sh bench --ratios FILE..." ;;
figures) fail "figures are drawn by ./launch.sh docs, one of them by docs --figure NAME" ;;
articles | docs | exercise | check) module=zerolab.teach.$command ranked= ;;
notebooks)
    module=jupyterlab own=("--notebook-dir=$here/notebooks") ranked=
    if [ "${1:-}" = --html ]; then
        [ $# -le 2 ] && [[ ${2:-} != -* ]] || fail "--html takes a folder and nothing else, got '${*:2}'"
        mkdir -p "${2:-$here/notebooks/html}" || fail "cannot write to '${2:-notebooks/html}'"
        html=$(cd "${2:-$here/notebooks/html}" && pwd)
        module=nbconvert own=(--to html --execute "--output-dir=$html" "$here"/notebooks/*.ipynb)
    fi
    ;;
test) ranked= ;;
*)
    printf -v list ', %s' "${commands[@]}"
    near='import difflib, sys; print(*difflib.get_close_matches(sys.argv[1], sys.argv[2:]), sep=" or ")'
    near=$(python3 -c "$near" "$command" "${commands[@]}" 2>/dev/null || true)
    fail "no command '$command'${near:+: did you mean $near?} There are: ${list:2}"
    ;;
esac

ranks=
if [ -n "$ranked" ] && [ $# -gt 0 ] && [[ $1 != -* ]]; then
    ranks=$1
    shift
    [[ $ranks =~ ^[1-9][0-9]{0,2}$ ]] || fail "N must be a number of ranks, 1 to 999, got '$ranks'"
fi
machines=${NNODES:-1}
[ -n "$ranked" ] || machines=1 # the others start no ranks on several
if [ "$machines" != 1 ]; then # torchrun itself says what else is wrong with these
    [ -n "${RDZV_ENDPOINT:-}" ] || fail "NNODES=$NNODES needs RDZV_ENDPOINT=host:port of one machine, reachable from all"
    [ "$command" = train ] || [ "${NODE_RANK:-}" -lt "$NNODES" ] 2>/dev/null ||
        fail "NNODES=$NNODES needs NODE_RANK, another on each machine, the first 0, got '${NODE_RANK:-}'"
fi
[[ ${OMP_NUM_THREADS:-1} =~ ^[1-9][0-9]*(,[1-9][0-9]*)*$ ]] ||
    fail "OMP_NUM_THREADS must be a number of threads per rank, 1 or more, got '$OMP_NUM_THREADS'"

# The environment: yours, or .venv with what requirements.txt pins, made once.
if [ -n "${PYTHON:-}" ]; then
    python=$(command -v "$PYTHON") || fail "PYTHON=$PYTHON is not a command"
    # By what is installed and not by importing it, which takes seconds.
    "$python" -c 'from importlib.metadata import version; version("psutil")
assert [*map(int, version("torch").split(".")[:2])] >= [2, 11]' 2>/dev/null ||
        fail "PYTHON=$PYTHON has no psutil, or no torch from 2.11 on; unset PYTHON to have .venv made"
else
    python=$here/.venv/bin/python
    wanted=$(cksum <"$here/requirements.txt")
    if [ "$(cat "$here/.venv/installed" 2>/dev/null)" != "$wanted" ]; then
        echo "making $here/.venv, once, and installing what requirements.txt pins: torch, Jupyter and some small ones"
        if [ "$(uname)" = Linux ] && [ -z "${PIP_INDEX_URL:-}${PIP_EXTRA_INDEX_URL:-}" ]; then
            echo "torch's usual build brings NVIDIA's libraries: 5 GB in all. Without an NVIDIA GPU stop this by Ctrl-C, and"
            echo "set PIP_EXTRA_INDEX_URL to the address of torch's builds for CPUs, which PyTorch's page 'Get Started' has"
            echo "behind --index-url: 1.5 GB in all. Or PYTHON=python3 takes the torch that you have, and installs nothing"
        fi
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            fail "python3 is $(python3 --version 2>&1), 3.11 or newer is needed; or set PYTHON to an environment with torch"
        python3 -m venv "$here/.venv" || fail "python3 -m venv failed (on Debian and Ubuntu: apt install python3-venv)"
        "$python" -m pip install --disable-pip-version-check -r "$here/requirements.txt" ||
            fail "the installation failed, see above; the next start tries again"
        echo "$wanted" >"$here/.venv/installed" # last: an interrupted installation is started over
    fi
fi

# Paths on the command line begin where the user stands, so nobody changes the folder. The project is found wherever
# that is, and nothing that lies there is imported in its place (PYTHONSAFEPATH).
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
# What is started here ends with whoever has started this, or with this shell (zerolab/run/starter.py).
export ZERO_STARTER=${ZERO_STARTER:-$$}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
start=$here/zerolab/run/start.py
if [ "$command" = test ] && [ "${1:-}" = --simulated-gpus ]; then
    shift
    exec "$python" -m extra.simulated_gpu.run "$@"
fi
if [ "$command" = test ]; then
    cd "$here" # tests are named by their place in the project
    # All of them: two at a time, because many wait for their ranks.
    if [[ "$*" =~ ^(-m (long|thorough))?$ ]] && "$python" -c 'import xdist' 2>/dev/null; then
        set -- "$@" -n 2 --dist loadfile
    fi
    echo "+ $(basename "$python") -m pytest $*"
    trap 'stopped=130' INT # pytest itself has 2 for it, as for other things
    "$python" -m pytest "$@" && status=0 || status=$?
    exit "${stopped:-$status}"
fi
if [ "$command" = notebooks ]; then
    "$python" -c "import $module, ipykernel" 2>/dev/null ||
        fail "this Python has no Jupyter: $python -m pip install jupyter"
fi
if [ -n "$html" ]; then
    "$python" "$start" "$module" "${own[@]}" || fail "a cell has failed, see above; what is in $html is not complete"
    # A notebook leads to the next one, and to files of the project: the pages do so too.
    sed -i.bak -E -e 's|href="([0-9]{2}[a-z]?_[a-z0-9_]+)\.ipynb"|href="\1.html"|g' \
        -e "s|href=\"\.\./|href=\"file://${here// /%20}/|g" "$html"/*.html
    rm "$html"/*.html.bak
    echo "written: $html"
    exit
fi
if [ "$command" = notebooks ]; then
    [ "$(id -u)" != 0 ] || own+=(--allow-root) # as in most containers; Jupyter asks for it
    unset ZERO_STARTER # what a kernel starts ends with that kernel
    exec "$python" -m "$module" "${own[@]}" "$@"
fi
if [ -z "$ranked" ]; then # one process is enough
    exec "$python" "$start" "$module" "${own[@]}" "$@"
fi
for option in "$@"; do # an answer that needs no ranks
    case "$option" in -h | --help | --host | --ratios) exec "$python" "$start" "$module" "${own[@]}" "$@" ;; esac
done

# One process without ranks checks the options, so that a mistake is one line and not one per rank, and chooses
# the number of ranks (zerolab/run/process_group.py): the last two lines are N, and why.
echo "checking the options (importing torch takes a few seconds)"
asked=(zerolab.measure.enough_memory "$module" "${own[@]}" "$@") # which asks one question more
plan=$(ZERO_PREFLIGHT=${ranks:-auto} "$python" "$start" "${asked[@]}") || exit $(($? == 130 ? 130 : 2))
why=${plan##*$'\n'} ranks=${plan%$'\n'*}
ranks=${ranks##*$'\n'} # what stands before these two lines a file of the user's has printed
[[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "the check of the options has ended without a number of ranks; it said '$plan'"
echo "$why"
if [ "$machines" = 1 ]; then
    how=(--standalone)
elif [ "$command" = train ]; then
    how=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id train)
else
    how=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --rdzv-backend static --rdzv-endpoint "$RDZV_ENDPOINT")
fi
if [ "$command" = train ]; then
    # Ranks that are asked to stop get that signal, and may take their time to save. A machine that is gone is missed
    # after ten seconds, and new ranks meet at a store of their own: in the old one lies what the old ranks have left.
    how+=(--max-restarts 3 --signals-to-handle SIGTERM,SIGINT,SIGUSR1,SIGHUP,SIGQUIT)
    how+=(--rdzv-conf last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=10)
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
fi
program=("$ranks" -m "$module" "${own[@]}" "$@")
echo "+ OMP_NUM_THREADS=$OMP_NUM_THREADS torchrun ${how[*]} --nproc-per-node ${program[*]}"
exec "$python" "$start" zerolab.run.torchrun "${how[@]}" --nproc-per-node "${program[@]}"
