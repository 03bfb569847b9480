#!/usr/bin/env bash
# Runs the numbered scripts and compares what each prints with the book's Expected Output.
# run_tests.sh sources this file for find_python.

usage() {
    cat <<'END'
Usage: ./run_all.sh [-j N] [--timeout SECONDS] [--list] [SCRIPT ...]

Runs every chapter*/NN_*.py and compares its stdout, byte for byte, with the book's Expected Output
in expected_outputs/chapter*/NN_*.txt.

SCRIPT is a chapter (chapter20), a number or the start of a name (03), or a path; without one, all
scripts run.

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

root=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")

say() {
    printf '%s\n' "$1" || exit 2 # a full disk must not look like success
}

die() {
    printf '%s: %s\n' "${0##*/}" "$1" >&2
    exit 2
}

# --- The interpreter ---

# Which of torch, triton and numpy the interpreter $1 lacks; "Python" where it does not run at all.
# They are looked for, not imported: importing torch takes longer than everything else here.
# What lies in the working directory does not count: a script does not see it either.
lacking() {
    "$1" -c '
import sys
from importlib.util import find_spec
sys.path[:] = filter(None, sys.path)
specs = {name: find_spec(name) for name in ("torch", "triton", "numpy")}
print(*[name for name, spec in specs.items() if not spec or not spec.origin])
' 2>/dev/null || echo Python
}

# Sets python to the interpreter that runs the scripts; sets .venv up where there is none.
find_python() {
    local venv=$root/.venv lacks candidate
    if [[ -n $PYTHON ]]; then
        lacks=$(lacking "$PYTHON")
        [[ -z $lacks ]] || die "PYTHON=$PYTHON lacks ${lacks// /, }"
        python=$PYTHON
        return
    fi
    for candidate in "$venv/bin/python" python3; do
        # An interrupted set-up leaves .venv.incomplete, and perhaps half of a package in .venv.
        [[ $candidate == "$venv"/* && -s $venv.incomplete ]] && continue
        if [[ -z $(lacking "$candidate") ]]; then
            python=$candidate
            return
        fi
    done
    make_venv
    python=$venv/bin/python
}

make_venv() {
    local venv=$root/.venv
    command -v python3 >/dev/null || die "there is no python3: install Python 3.10 or newer"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$(python3 --version) is too old: set PYTHON to Python 3.10 or newer with torch and triton"
    python3 -c 'import ensurepip, venv' 2>/dev/null ||
        die "python3 has no venv module (on Debian and Ubuntu: apt install python3-venv)"
    [[ -w $root ]] || die "$root is not writable, so no .venv can be made there: set PYTHON"
    # One set-up at a time. Python takes the lock, and this shell's file descriptor keeps it.
    exec 9>>"$venv.incomplete"
    python3 -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    if [[ -s $venv.incomplete ]]; then
        rm -rf -- "$venv"
    elif [[ -z $(lacking "$venv/bin/python") ]]; then
        exec 9>&- # another run has made it in the meantime
        return
    fi
    echo "setting .venv up" >&9
    printf '%s\n' "No torch, triton and numpy found: installing requirements.txt into .venv (once)." >&2
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || python3 -m venv "$venv" >&2 ||
        die "python3 -m venv failed: see above"
    "$venv/bin/python" -m pip install --disable-pip-version-check --retries 2 \
        -r "$root/requirements.txt" >&2 ||
        die "could not install requirements.txt into .venv: is there a network, and room on the disk?"
    rm -f -- "$venv.incomplete"
    exec 9>&-
}

# Prints the versions and the device that the scripts use. torch is slow to import and is asked only
# where there is a GPU's driver: without one, torch sees no GPU.
describe() {
    "$python" -c '
import ctypes, os, platform, sys
from importlib.metadata import version

sys.path[:] = filter(None, sys.path)


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


versions = [f"{name} {version(name)}" for name in ("torch", "triton", "numpy")]
device = gpu() or "no GPU in use: Triton interpreter on the CPU"
print(f"Python {platform.python_version()}", *versions, device, sep=", ")
' 2>&1 | tail -n 1
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
        done | sort -zu
    )
    shopt -u nullglob
}

# Whether the argument $2, whose absolute path is $3, chooses the name $1.
chooses() {
    local base=${1##*/}.py chapter=${1%/*}
    case $3 in
    "$root/$chapter" | "$root/$1.py" | "$root/expected_outputs/$1.txt") return 0 ;;
    esac
    case $2 in
    "$chapter" | "$chapter/" | "$1" | "$1.py") return 0 ;;
    [0-9]) [[ $base == "0$2_"* ]] ;;
    *) [[ -n $2 && $base == "$2"* ]] ;;
    esac
}

# Keeps those of names that the arguments choose.
choose() {
    local argument path i found chosen=()
    for argument; do
        found=
        path=$(readlink -m -- "$argument")
        for i in "${!names[@]}"; do
            if chooses "${names[i]}" "$argument" "$path"; then
                found=1
                chosen[i]=${names[i]}
            fi
        done
        [[ -n $found ]] || die "no script matches '$argument': ./run_all.sh --list lists them"
    done
    names=("${chosen[@]}")
}

milliseconds() {
    date +%s%3N
}

# Starts names[$1] in a process group of its own, so that it can be ended with all its children.
start() {
    local files=$tmp/$1 script=$root/${names[$1]}.py
    set -m
    {
        begin=$(milliseconds)
        timeout --foreground --kill-after=5 "$limit" "$python" "$script" >"$files.out" 2>"$files.err"
        echo "$? $(($(milliseconds) - begin))" >"$files.end"
    } </dev/null >/dev/null 2>&1 &
    set +m
    running[$1]=$!
}

# Ends what is left of the script of names[$1].
end() {
    kill -KILL -- "-${running[$1]}" 2>/dev/null
    unset "running[$1]"
}

cleanup() {
    local i
    for i in "${!running[@]}"; do
        end "$i"
    done
    [[ -z $describing ]] || kill -KILL -- "-$describing" 2>/dev/null
    rm -rf -- "$tmp"
}

# What is wrong with the expected file or the script of names[$1] before it is run, if anything.
missing() {
    local expected=expected_outputs/${names[$1]}.txt script=${names[$1]}.py
    if [[ ! -e $root/$script ]]; then
        echo "$expected has no script: there is no $script"
    elif [[ ! -f $root/$expected ]]; then
        echo "there is no expected file $expected"
    elif [[ ! -r $root/$expected ]]; then
        echo "the expected file $expected cannot be read"
    elif [[ ! -s $root/$expected ]]; then
        echo "the expected file $expected is empty"
    fi
}

# The first 40 lines of standard input, so that a wild script floods no terminal; control characters
# are made visible, so that a carriage return or an escape sequence is seen and does nothing.
excerpt() {
    head -n 40 | cut -b 1-300 | cat -v
}

# Prints the verdict on names[$1], and counts it.
report() {
    local files=$tmp/$1 script=${names[$1]}.py expected=expected_outputs/${names[$1]}.txt
    local status='' took=0 signal problem details=''
    problem=$(missing "$1")
    if [[ -z $problem ]]; then
        read -r status took 2>/dev/null <"$files.end"
        if [[ -z $status ]]; then
            problem="was ended from outside"
        elif ((took >= limit * 1000)) && [[ $status == 124 || $status == 137 ]]; then
            problem="timed out after $limit s"
        elif ((status > 128)) && signal=$(kill -l "$((status - 128))" 2>/dev/null); then
            problem="was killed by SIG$signal (exit status $status)"
        elif ((status != 0)); then
            problem="exit status $status"
        fi
        if [[ -n $problem ]]; then
            details=$(tail -n 20 "$files.err" | excerpt)
            [[ -z $details ]] || details="The end of its stderr:"$'\n'$details
        elif ! diff --text --unified --label "$expected" --label "$script" \
            "$root/$expected" "$files.out" >"$files.diff" 2>&1; then
            problem="stdout is not the expected output"
            details=$(excerpt <"$files.diff")
        fi
    fi
    printf -v took '%d.%d s' "$((took / 1000))" "$((took % 1000 / 100))"
    if [[ -z $problem ]]; then
        passed=$((passed + 1))
        say "${green}PASS${plain}  $script  $took"
    else
        failed=$((failed + 1))
        say "${red}FAIL${plain}  $script  $took: $problem"
        [[ -z $details ]] || say "$details"
    fi
}

main() {
    local arguments=() jobs='' list='' i shown=0 next=0
    local green='' red='' plain='' passed=0 failed=0
    limit=300
    while (($# > 0)); do
        case $1 in
        -h | --help) usage && exit ;;
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
    jobs=${jobs:-$(nproc)}
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
    running=() describing=
    tmp=$(mktemp -d) || die "no temporary directory can be made in ${TMPDIR:-/tmp}"
    trap cleanup EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 141' PIPE
    trap 'exit 143' TERM

    set -m
    describe >"$tmp/versions" </dev/null &
    describing=$!
    set +m
    while ((shown < ${#names[@]})); do
        for i in "${!running[@]}"; do
            kill -0 "${running[i]}" 2>/dev/null || end "$i"
        done
        while ((next < ${#names[@]} && ${#running[@]} < jobs)); do
            [[ -n $(missing "$next") ]] || start "$next"
            next=$((next + 1))
        done
        if ((shown < next)) && [[ -z ${running[shown]} ]]; then
            if [[ -n $describing ]]; then
                wait "$describing"
                describing=
                say "$(<"$tmp/versions")"
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
