#!/usr/bin/env bash
# Runs the numbered scripts and compares what each prints with the book's Expected Output.
# run_tests.sh sources this file for find_python.

usage() {
    cat <<'END'
Usage: ./run_all.sh [-j N] [--timeout SECONDS] [--list] [SCRIPT ...]

Runs every chapter*/NN_*.py and compares its stdout, byte for byte, with the book's Expected Output
in expected_outputs/chapter*/NN_*.txt.

SCRIPT is a chapter (chapter20), a number or the start of a name (03, chapter20/03), or a path;
without one, all scripts run.

  -j N               run N scripts at a time (default: as many as there are processors)
  --timeout SECONDS  the longest that one script may take (default: 300)
  --list             list the chosen scripts instead of running them
  -h, --help         print this help

The interpreter is $PYTHON where set, else .venv/bin/python, else python3, whichever has torch,
triton and numpy; where none has, .venv is made and requirements.txt installed into it.
TRITON_INTERPRET=1 runs the scripts in Triton's interpreter, on the CPU, where there is a GPU too.

Exit status: 0 all passed, 1 some failed, 2 wrong usage or no set-up, 130 interrupted.
END
}

# Here and below: bash may lose a Ctrl-C that it gets while it waits for $(...), not so with read.
IFS= read -r root < <(readlink -f -- "${BASH_SOURCE[0]}")
root=${root%/*}

if [[ $OSTYPE != linux* ]]; then
    echo "${0##*/}: Triton is made for Linux only; on Windows, use WSL 2" >&2
    exit 2
fi

# The same scripts do the same everywhere: no assert dropped, no exit status swallowed, no warning
# made an error, and the bytes of stdout do not depend on the locale.
unset PYTHONOPTIMIZE PYTHONINSPECT PYTHONWARNINGS
export PYTHONIOENCODING=utf-8

say() {
    printf '%s\n' "$1" 2>&3 || exit 2 # a full disk must not look like success
}

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 2
}

# --- The interpreter ---

# Whether the interpreter $1 cannot run the scripts; sets why ("lacks torch, triton").
# The packages are looked for, not imported: importing torch takes longer than everything else here.
# What lies in the working directory does not count: a script does not see it either.
unfit() {
    IFS= read -r why < <("$1" -c '
import sys
from importlib.util import find_spec
sys.path[:] = filter(None, sys.path)
specs = {name: find_spec(name) for name in ("torch", "triton", "numpy")}
lacks = [name for name, spec in specs.items() if not spec or not spec.origin]
print("lacks " + ", ".join(lacks) if lacks else "")
' 2>/dev/null || echo "does not run as Python 3")
    [[ -n $why ]]
}

# Sets python to the interpreter that runs the scripts; sets .venv up where there is none.
find_python() {
    local venv=$root/.venv why candidate
    if [[ -n $PYTHON ]]; then
        ! unfit "$PYTHON" || die "PYTHON=$PYTHON $why"
        python=$PYTHON
        return
    fi
    for candidate in "$venv/bin/python" python3; do
        # An interrupted set-up leaves .venv.incomplete, and perhaps half of a package in .venv.
        [[ $candidate == "$venv"/* && -s $venv.incomplete ]] && continue
        if ! unfit "$candidate"; then
            python=$candidate
            return
        fi
    done
    make_venv
    python=$venv/bin/python
}

make_venv() {
    local venv=$root/.venv why free made=
    command -v python3 >/dev/null || die "there is no python3: install Python 3.10 or newer"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        die "python3 is not Python 3.10 or newer, but $(python3 --version 2>&1 | head -n 1):" \
            "set PYTHON to one that has torch, triton and numpy"
    python3 -c 'import ensurepip, venv' 2>/dev/null ||
        die "python3 has no venv module (on Debian and Ubuntu: apt install python3-venv)"
    [[ -w $root ]] || die "$root is not writable, so no .venv can be made there: set PYTHON"
    # One set-up at a time. Python takes the lock, and this shell's file descriptor keeps it.
    exec 9>>"$venv.incomplete"
    python3 -c '
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("Waiting for another run, which is setting .venv up.", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)
'
    if [[ -s $venv.incomplete ]]; then
        rm -rf -- "$venv"
    elif ! unfit "$venv/bin/python"; then
        exec 9>&- # another run has made it in the meantime
        return
    fi
    IFS= read -r free < <(df --output=avail -k -- "$root" | tail -n 1)
    ((free >= 2000000)) || die "$root has $((free / 1000)) MB free, and .venv needs at least 2 GB"
    echo "setting .venv up" >&9
    cat >&2 <<'END'
No torch, triton and numpy found: installing requirements.txt into .venv (once). On x86-64 this
downloads 2.8 GB and takes 4.7 GB of disk. Without a GPU 0.4 GB and 1.7 GB are enough: Ctrl-C, then
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu ./run_all.sh
END
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        made=1
        python3 -m venv "$venv" >&2 || die "python3 -m venv failed: see above"
    fi
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --retries 2 \
        -r "$root/requirements.txt" >&2; then
        # Half of a .venv could fill the disk, and the mark would hide one that is made by hand.
        [[ -z $made ]] || { rm -rf -- "$venv" && : >"$venv.incomplete"; }
        die "could not install requirements.txt into .venv: is there a network, and room for it" \
            "here and in ${TMPDIR:-/tmp}?"
    fi
    ! unfit "$venv/bin/python" || die ".venv $why, although requirements.txt is installed"
    rm -f -- "$venv.incomplete"
    exec 9>&-
}

# Prints the versions and the device that the scripts use, or what could not be found out. torch is
# slow to import and is asked only where there is a GPU's driver: without one, torch sees no GPU.
describe() {
    timeout --foreground --signal=KILL "$limit" "$python" -c '
import ctypes, os, platform, sys
from importlib.metadata import version

sys.path[:] = filter(None, sys.path)


def versioned(name):
    try:
        return f"{name} {version(name)}"
    except Exception:
        return f"{name} of unknown version"


def gpu():
    if os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y"):
        return None
    if not os.path.exists("/dev/kfd"):  # AMD
        try:
            ctypes.CDLL("libcuda.so.1")  # NVIDIA
        except OSError:
            return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


try:
    device = gpu() or "no GPU in use: Triton interpreter on the CPU"
except Exception as error:
    device = f"unknown device: {error!r}"
versions = map(versioned, ("torch", "triton", "numpy"))
print(f"Python {platform.python_version()}", *versions, device, sep=", ")
' || echo "unknown versions and device: exit status $?"
}

# --- The scripts ---

# Sets names to what there is to check, in order: chapter20/01_fused_linear_gelu and so on, from the
# scripts and from the expected files, so that neither goes unnoticed without the other.
find_names() {
    local file name
    names=()
    shopt -s nullglob
    while IFS= read -r -d '' name; do
        names+=("$name")
    done < <(
        for file in "$root"/chapter*/[0-9][0-9]_*.py \
            "$root"/expected_outputs/chapter*/[0-9][0-9]_*.txt; do
            name=${file#"$root"/}
            name=${name#expected_outputs/}
            printf '%s\0' "${name%.*}"
        done | LC_ALL=C sort -zu
    )
    shopt -u nullglob
}

# Whether the argument $2 chooses the name $1.
chooses() {
    local base=${1##*/}.py chapter=${1%/*} file
    for file in "$chapter" "$1.py" "expected_outputs/$1.txt"; do
        [[ ! $2 -ef $root/$file ]] || return 0
    done
    case $2 in
    '') return 1 ;;
    "$chapter") return 0 ;;
    */*) [[ $1.py == "$2"* ]] ;;
    [0-9]) [[ $base == "0$2_"* ]] ;;
    *) [[ $base == "$2"* ]] ;;
    esac
}

# Keeps those of names that the arguments choose.
choose() {
    local argument i found chosen=()
    for argument; do
        found=
        for i in "${!names[@]}"; do
            if chooses "${names[i]}" "$argument"; then
                found=1
                chosen[i]=${names[i]}
            fi
        done
        [[ -n $found ]] || die "no script matches '$argument': ./run_all.sh --list lists them"
    done
    names=("${chosen[@]}")
}

# Sets problem to what is wrong with the files of names[$1] before it is run, if anything.
check_files() {
    local expected=expected_outputs/${names[$1]}.txt script=${names[$1]}.py
    problem=
    if [[ ! -e $root/$script ]]; then
        problem="$expected has no script: there is no $script"
    elif [[ ! -f $root/$expected ]]; then
        problem="there is no expected file $expected"
    elif [[ ! -r $root/$expected ]]; then
        problem="the expected file $expected cannot be read"
    elif [[ ! -s $root/$expected ]]; then
        problem="the expected file $expected is empty"
    fi
}

milliseconds() {
    date +%s%3N
}

# The first 40 lines of standard input, so that a wild script floods no terminal; control characters
# are made visible, so that a carriage return or an escape sequence is seen and does nothing.
excerpt() {
    local lines
    mapfile -t -n 41 lines < <(cut -b 1-300 | cat -v)
    printf '%s\n' "${lines[@]:0:40}"
    ((${#lines[@]} <= 40)) || echo "..."
}

# The difference between the expected file $1 and the output $2 of the script $3. Of an endless
# output the beginning is enough; diff would take gigabytes of memory for it.
difference() {
    local size label=$3 most=1000000
    size=$(stat -c %s -- "$2")
    ((size <= most)) || label+=" (the first $most of $size bytes)"
    head -c "$most" -- "$2" | diff --text --unified --label "$1" --label "$label" "$root/$1" - 2>&1
}

# Runs names[$1]. Prints the milliseconds that it took, a line with what is wrong, which is empty
# where nothing is, and the details.
judge() {
    local script=${names[$1]}.py expected=expected_outputs/${names[$1]}.txt
    local out=$tmp/$1.out err=$tmp/$1.err begin took status signal problem=''
    begin=$(milliseconds)
    timeout --foreground --signal=KILL "$limit" "$python" "$root/$script" >"$out" 2>"$err"
    status=$?
    took=$(($(milliseconds) - begin))
    if ((took >= limit * 1000)) && [[ $status == 124 || $status == 137 ]]; then
        problem="timed out after $limit s"
    elif ((status > 128)) && signal=$(kill -l "$((status - 128))"); then
        problem="was killed by SIG$signal (exit status $status)"
    elif ((status != 0)); then
        problem="exit status $status"
    elif ! cmp --silent -- "$root/$expected" "$out"; then
        problem="stdout is not the expected output"
    fi
    printf '%s\n' "$took" "$problem"
    if ((status == 0)); then
        [[ -z $problem ]] || difference "$expected" "$out" "$script" | excerpt
    elif [[ -s $err ]]; then
        echo "The end of its stderr:"
        tail -c 10000 "$err" | tail -n 20 | excerpt
    fi
}

# Starts names[$1] in a process group of its own, so that it can be ended with all its children.
start() {
    set -m
    {
        trap '' TTIN TTOU # a script that reaches for the terminal is stopped, its judge is not
        judge "$1"
    } </dev/null >"$tmp/$1.verdict" 2>/dev/null 3>&- &
    set +m
    running[$1]=$!
}

# Ends what is left of the script of names[$1].
end() {
    kill -KILL -- "-${running[$1]}" 2>/dev/null
    unset "running[$1]"
}

cleanup() {
    local group
    # A job that was started this very moment is not yet in running.
    for group in "${running[@]}" $(jobs -p); do
        kill -KILL -- "-$group" 2>/dev/null
    done
    rm -rf -- "$tmp" || rm -rf -- "$tmp" # what is being killed may have made one more file
}

# Ends this run because of a signal, with exit status $1. Another Ctrl-C does not cut that short.
interrupted() {
    trap '' EXIT HUP INT PIPE QUIT TERM
    cleanup
    exit "$1"
}

# Prints the verdict on names[$1], and counts it.
report() {
    local script=${names[$1]}.py lines=() took problem details
    check_files "$1"
    if [[ -z $problem ]]; then
        mapfile -t lines <"$tmp/$1.verdict"
        # Without a verdict its judge, too, was killed; or the disk is full.
        problem=${lines[1]-was killed with its process group, or there is no room in "${tmp%/*}"}
    fi
    took=${lines[0]:-0}
    printf -v took '%d.%d s' "$((took / 1000))" "$((took % 1000 / 100))"
    if [[ -z $problem ]]; then
        passed=$((passed + 1))
        say "${green}PASS${plain}  $script  $took"
    else
        failed=$((failed + 1))
        say "${red}FAIL${plain}  $script  $took: $problem"
        printf -v details '%s\n' "${lines[@]:2}"
        ((${#lines[@]} <= 2)) || say "${details%$'\n'}"
    fi
}

main() {
    local arguments=() jobs list='' lines header i problem describing='' shown=0 next=0
    local green='' red='' plain='' passed=0 failed=0
    running=() tmp=''
    trap cleanup EXIT
    trap 'interrupted 129' HUP
    trap 'interrupted 130' INT
    trap 'interrupted 131' QUIT
    trap 'interrupted 141' PIPE
    trap 'interrupted 143' TERM
    exec 3>&2 # for say
    limit=300
    read -r jobs < <(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # they are for torch
    while (($# > 0)); do
        case $1 in
        -h | --help)
            say "$(usage)"
            exit 0
            ;;
        --list) list=1 ;;
        -j | --timeout)
            (($# > 1)) || die "$1 needs a number"
            if [[ $1 == -j ]]; then jobs=$2; else limit=$2; fi
            shift
            ;;
        -j*) jobs=${1#-j} ;;
        --timeout=*) limit=${1#*=} ;;
        --) shift && arguments+=("$@") && break ;;
        -*) die "unknown option $1: ./run_all.sh --help" ;;
        *) arguments+=("$1") ;;
        esac
        shift
    done
    [[ $jobs =~ ^[1-9][0-9]{0,5}$ ]] || die "-j needs a number of 1 or more, got '$jobs'"
    [[ $limit =~ ^[1-9][0-9]{0,5}$ ]] || die "--timeout needs 1 or more whole seconds, got '$limit'"

    find_names
    ((${#names[@]} > 0)) || die "there is no script $root/chapter*/NN_*.py"
    ((${#arguments[@]} == 0)) || choose "${arguments[@]}"
    if [[ -n $list ]]; then
        for i in "${!names[@]}"; do
            say "${names[i]}.py"
        done
        exit 0
    fi

    command -v diff >/dev/null || die "there is no diff: install diffutils"
    find_python
    if [[ -t 1 && -z $NO_COLOR && $TERM != dumb ]]; then
        green=$'\e[32m' red=$'\e[31m' plain=$'\e[0m'
    fi
    tmp=${TMPDIR:-/tmp}/run_all.$$.$RANDOM
    if ! mkdir -m 700 -- "$tmp"; then
        tmp=
        die "no temporary directory can be made in ${TMPDIR:-/tmp}"
    fi
    # bash reports on stderr which of its jobs a signal ended; report does so better.
    exec 2>/dev/null
    set -m
    describe >"$tmp/versions" </dev/null 3>&- &
    describing=$!
    set +m
    while ((shown < ${#names[@]})); do
        for i in "${!running[@]}"; do
            kill -0 "${running[i]}" 2>/dev/null || end "$i"
        done
        while ((next < ${#names[@]} && ${#running[@]} < jobs)); do
            check_files "$next"
            [[ -n $problem ]] || start "$next"
            next=$((next + 1))
        done
        if ((shown < next)) && [[ -z ${running[shown]} ]]; then
            if [[ -n $describing ]]; then
                wait "$describing"
                describing=
                # Importing torch may have printed lines of its own before.
                mapfile -t lines <"$tmp/versions"
                header=${lines[*]: -1}
                say "${header:-unknown versions and device}"
            fi
            report "$shown"
            shown=$((shown + 1))
        else
            wait -n
        fi
    done
    say "$passed passed, $failed failed"
    ((failed == 0))
    exit
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    main "$@"
fi
