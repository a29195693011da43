#!/usr/bin/env bash
# The one door: sets up the environment, chooses ranks and backend, and runs torchrun.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here"

usage() {
    cat <<'TEXT'
Learn
./launch.sh zero1|zero2|zero3 [N] [options]   a chapter runs: a few steps, then one told event by event
                                         (--trace FILE: a step for chrome://tracing; --help lists all options)
./launch.sh watch [zero3] [N] [options]  records a step of every engine, as a page to watch in a browser (--bug 19)
./launch.sh changes [zero1 zero2]        what changes from a chapter's class to the next one's, method by method
./launch.sh articles [options]           the articles' claims, each run or added up here: holds, holds when ..., does not
./launch.sh notebooks [options]          opens Jupyter Lab in notebooks/ (options are Jupyter's); --html [FOLDER]: executed
                                         copies as HTML pages, for those who only read (minutes)
./launch.sh exercise NAME [--hints 1]    writes exercises/NAME.py with blanks: zero1, zero1_2psi, zero2 or zero3
./launch.sh check NAME [N] [--hint]      says of an exercise, step by step: passed, or what was expected and found
./launch.sh bug [NUMBER] [--hint|--answer]    the museum of bugs: run one and see the symptom; without NUMBER the list

Run
./launch.sh                              the referee: one GPT under one process, DDP, the stages and torch's own
./launch.sh compare [N] [options]        the same on N ranks (--help lists the options)
./launch.sh train STAGE [N] [options]    a training run that comes back: ranks that die or hang are started again, and the
                                         same line goes on where it stopped (--help lists the options)
./launch.sh test [pytest options]        the tests
./launch.sh test --simulated-gpus N      the GPU path on GPUs that exist on paper, searched for races (tests/simulated_gpu/)
./launch.sh help                         this text

Measure
./launch.sh report [FOLDER] [--minutes 10] [--quick]   all that is worth knowing of this machine, as a page to send
./launch.sh memory [options]             what each engine holds, needs and sends at 7B, without a GPU (--help lists options)
./launch.sh plan [options]               predicted step times on GPUs that you do not have; --validate, --sweep
./launch.sh sweeps [N] [options]         bucket size, units, prefetch, recomputation: step time, peak and collectives
./launch.sh bench [N] [options]          step times of all engines, interleaved, on a model of your size; --host: the host's part
./launch.sh conform [ENGINE|FILE.py ...] [N] [options]   who trains right, who refuses, who is silently wrong: every
                                         property, asked of ours, of torch's own, of DeepSpeed and of yours
./launch.sh ratios FILE...               ratios of step times over several launches of the referee, from their --json files
./launch.sh figures [options]            draws what is in results/ to results/figures/
./launch.sh docs [--check]               writes the tables of README.md and docs/ from results/; --check says what is stale

Without N: one rank per GPU over NCCL where there are two GPUs or more, else two ranks over gloo.
Paths in options begin at this file's folder, unless they begin with /.

Environment:
  PYTHON=python3       use this Python as it is and install nothing (default: .venv, made on the first start)
  NNODES, NODE_RANK, RDZV_ENDPOINT=host:port    the same line on every machine; N is then the ranks per machine
                       train needs no NODE_RANK, and takes a range: NNODES=1:2 goes on with one machine of two
  OMP_NUM_THREADS      threads per rank (default 1: the ranks share the cores)
  ZERO_TIMEOUT         seconds until a collective that somebody never joins is an error (default 120)
TEXT
}

fail() {
    echo "launch.sh: $*" >&2
    exit 2
}

# Everything that can be refused is refused before anything is installed.
command=${1-compare}
[ $# -gt 0 ] && shift
entry=() ranked=yes html= # what Python is given, and whether by torchrun
case "$command" in
help | -h | --help) usage && exit 0 ;;
compare) entry=(fsdp2_compare.py) ;;
train)
    case "${1:-}" in
    zero1 | zero2 | zero3) ;;
    -h | --help) set -- zero3 --help ;;
    *) fail "train needs a stage, zero1, zero2 or zero3, as in: ./launch.sh train zero3 2; got '${1:-}'" ;;
    esac
    entry=(-m harness.run.train "$1")
    shift
    ;;
zero1 | zero2 | zero3) entry=("$command.py") ;;
sweeps | bench) entry=(-m "harness.measure.$command") ;;
memory) entry=(-m harness.measure.memory) ranked= ;;
bug) entry=(-m harness.teach.museum) ranked= ;; # it starts its ranks itself, as they may hang or die; check does so too
report) entry=(-m harness.measure.report) ranked= ;; # and so does this
plan) entry=(-m harness.plan) ranked= ;;
conform) entry=(-m harness.properties.conform) ranked= ;;
figures | ratios) entry=(-m "harness.measure.$command") ranked= ;;
articles | changes | docs | exercise | check | watch) entry=(-m "harness.teach.$command") ranked= ;;
notebooks)
    entry=(-m jupyterlab "--notebook-dir=$here/notebooks") ranked=
    if [ "${1:-}" = --html ]; then
        [ $# -le 2 ] && [[ ${2:-} != -* ]] || fail "--html takes a folder and nothing else, got '${*:2}'"
        mkdir -p "${2:-$here/notebooks/html}" || fail "cannot write to '${2:-notebooks/html}'"
        html=$(cd "${2:-$here/notebooks/html}" && pwd)
        entry=(-m nbconvert --to html --execute "--output-dir=$html" "$here"/notebooks/*.ipynb)
    fi
    ;;
test) ranked= ;;
*)
    fail "no command '$command'; there are: zero1, zero2, zero3, watch, changes, articles, notebooks, exercise, check," \
        "bug, compare, train, test, help, report, memory, plan, sweeps, bench, conform, ratios, figures, docs"
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
if [ "$command" = train ] && [ "$machines" != 1 ]; then
    [[ $NNODES =~ ^[1-9][0-9]{0,4}(:[1-9][0-9]{0,4})?$ ]] && [ "${NNODES%:*}" -le "${NNODES#*:}" ] ||
        fail "NNODES must be a number of machines or a range as 1:2, got '$NNODES'"
    [ -n "${RDZV_ENDPOINT:-}" ] || fail "NNODES=$NNODES needs RDZV_ENDPOINT=host:port of one machine, reachable from all"
elif [ "$machines" != 1 ]; then
    [[ $NNODES =~ ^[1-9][0-9]{0,4}$ ]] || fail "NNODES must be a number of machines, got '$NNODES'"
    [ -n "${RDZV_ENDPOINT:-}" ] || fail "NNODES=$NNODES needs RDZV_ENDPOINT=host:port of machine 0, reachable from all"
    [[ ${NODE_RANK:-} =~ ^[0-9]{1,5}$ ]] || fail "NNODES=$NNODES needs NODE_RANK=0..$((NNODES - 1)), another on each machine"
    [ "$NODE_RANK" -lt "$NNODES" ] || fail "NODE_RANK=$NODE_RANK, but with NNODES=$NNODES the last one is $((NNODES - 1))"
fi
if [ "$machines" != 1 ]; then
    [[ $RDZV_ENDPOINT =~ ^(\[.+\]|[^:]+):[0-9]{1,5}$ ]] && [ "${RDZV_ENDPOINT##*:}" -le 65535 ] ||
        fail "RDZV_ENDPOINT must be host:port, got '$RDZV_ENDPOINT'"
fi
[[ ${OMP_NUM_THREADS:-1} =~ ^[1-9][0-9]*(,[1-9][0-9]*)*$ ]] ||
    fail "OMP_NUM_THREADS must be a number of threads per rank, 1 or more, got '$OMP_NUM_THREADS'"

# The environment: yours, or .venv with what requirements.txt pins, made once.
if [ -n "${PYTHON:-}" ]; then
    python=$(command -v "$PYTHON") || fail "PYTHON=$PYTHON is not a command"
    # By what is installed and not by importing it, which takes seconds.
    "$python" -c 'from importlib.metadata import version; assert [*map(int, version("torch").split(".")[:2])] >= [2, 11]' \
        2>/dev/null ||
        fail "PYTHON=$PYTHON has no torch, or one before 2.11; unset PYTHON to have .venv made"
else
    python=$here/.venv/bin/python
    wanted=$(cksum <requirements.txt)
    if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
        echo "making .venv and installing requirements.txt (once; torch is large, this takes minutes)"
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            fail "python3 is $(python3 --version 2>&1), 3.11 or newer is needed; or set PYTHON to an environment with torch"
        python3 -m venv .venv || fail "python3 -m venv failed (on Debian and Ubuntu: apt install python3-venv)"
        "$python" -m pip install -qq --disable-pip-version-check -r requirements.txt ||
            fail "the installation failed, see above; the next start tries again"
        echo "$wanted" >.venv/installed # last: an interrupted installation is started over
    fi
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
if [ "$command" = test ] && [ "${1:-}" = --simulated-gpus ]; then
    shift
    exec "$python" tests/simulated_gpu/run.py "$@"
fi
if [ "$command" = test ]; then
    # All of them: two at a time, as many wait for their ranks or compute in one process (groups: tests/conftest.py).
    if [ $# -eq 0 ] && "$python" -c 'import xdist' 2>/dev/null; then
        set -- -n 2 --dist loadgroup
    fi
    echo "+ $(basename "$python") -m pytest $*"
    exec "$python" -m pytest "$@"
fi
if [ "$command" = notebooks ]; then
    "$python" -c "import ${entry[1]}, ipykernel" 2>/dev/null ||
        fail "this Python has no Jupyter: $python -m pip install jupyter"
fi
if [ -n "$html" ]; then
    "$python" "${entry[@]}" || fail "a cell has failed, see above; what is in $html is not complete"
    # A notebook leads to the next one, and to files of the project: the pages do so too.
    sed -i.bak -E -e 's|href="([0-9]{2}_[a-z0-9_]+)\.ipynb"|href="\1.html"|g' \
        -e "s|href=\"\.\./|href=\"file://${here// /%20}/|g" "$html"/*.html
    rm "$html"/*.html.bak
    exit
fi
[ "$command" != notebooks ] || [ "$(id -u)" != 0 ] || entry+=(--allow-root) # as in most containers; Jupyter asks for it
if [ -z "$ranked" ]; then # one process is enough
    exec "$python" "${entry[@]}" "$@"
fi
for option in "$@"; do # an answer that needs no ranks
    case "$option" in -h | --help) exec "$python" "${entry[@]}" "$@" ;; esac
done

# One process without ranks checks the options, so that a mistake is one line and not one per rank, and chooses
# the number of ranks (harness/run/process_group.py): the last two lines are N, and why.
echo "checking the options (importing torch takes a few seconds)"
plan=$(ZERO_PREFLIGHT=${ranks:-auto} "$python" "${entry[@]}" "$@") || exit 2
why=${plan##*$'\n'} ranks=${plan%$'\n'*}
ranks=${ranks##*$'\n'} # what stands before these two lines a file of the user's has printed
[[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "the check of the options has ended without a number of ranks; it said '$plan'"
echo "$why"
torchrun=(torchrun) module=harness.run.torchrun
if [ "$machines" = 1 ]; then
    where=(--standalone)
elif [ "$command" = train ]; then
    where=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id train)
else
    where=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --rdzv-backend static --rdzv-endpoint "$RDZV_ENDPOINT")
fi
[ "$command" != train ] || torchrun=(python -m harness.run.restarts) module=harness.run.restarts
echo "+ OMP_NUM_THREADS=$OMP_NUM_THREADS ${torchrun[*]} ${where[*]} --nproc-per-node $ranks ${entry[*]} $*"
exec "$python" -m "$module" "${where[@]}" --nproc-per-node "$ranks" "${entry[@]}" "$@"
