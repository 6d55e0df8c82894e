# SPDX-License-Identifier: Apache-2.0
# Scripts that choose between GPUs and the CPU source this file. Each of them defines a function `fail`.
# The tests set BAPO_DEVICE_ROOT to a folder that is searched instead of /.

# Set device to gpu if nvidia-smi lists a GPU, and to cpu if it lists none, CUDA_VISIBLE_DEVICES hides all, or
# VERL_PLATFORM=cpu. Fail if there is a driver but no GPU is listed, if there are AMD GPUs, and if GPUs are too old, unless
# CUDA_VISIBLE_DEVICES is set and others are there.
choose_device() {
    local said sign
    device=cpu
    if [ "${VERL_PLATFORM:-}" = cpu ]; then return; fi
    case ${CUDA_VISIBLE_DEVICES-0} in '' | -*) return ;; esac
    said=$(nvidia-smi -L 2>&1 || true)
    if grep -q '^GPU' <<<"$said"; then device=gpu; refuse_old_gpus; return; fi
    said=${said#*gpus.sh: line *: }  # remove what bash puts before "nvidia-smi: command not found"
    # Without nvidia-smi, in a container or in WSL2, a run would otherwise train on the CPU while the GPUs are idle.
    for sign in /dev/nvidia0 /dev/dxg /proc/driver/nvidia/version; do
        [ ! -e "${BAPO_DEVICE_ROOT:-}$sign" ] || fail "$sign is here, and nvidia-smi lists no GPU (${said%%$'\n'*})." \
            "Repair or install nvidia-smi (in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility; in WSL2:" \
            "PATH=\$PATH:/usr/lib/wsl/lib), or set VERL_PLATFORM=cpu to use this machine's CPU."
    done
    [ ! -e "${BAPO_DEVICE_ROOT:-}/dev/kfd" ] || fail "/dev/kfd is here: this machine has AMD GPUs, which are not supported." \
        "Set VERL_PLATFORM=cpu to use its CPU."
}

refuse_old_gpus() {  # vLLM computes in bfloat16 only from compute capability 8.0 on
    local listed old usable
    listed=$(nvidia-smi --query-gpu=index,compute_cap,name --format=csv,noheader 2>/dev/null || true)
    old=$(grep -E '^[0-9]+, [1-7]\.' <<<"$listed" | paste -sd ';' || true)
    usable=$(sed -nE 's/^([0-9]+), ([89]|[1-9][0-9]+)\..*/\1/p' <<<"$listed" | paste -sd , || true)
    if [ -n "$old" ] && [ -z "$usable" ]; then
        fail "the GPUs here have a compute capability below 8.0 ($old), for which vLLM has no bfloat16. Set VERL_PLATFORM=cpu" \
            "to train the small example on the CPU."
    elif [ -n "$old" ] && [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then
        fail "not all GPUs here have the compute capability 8.0 that vLLM needs for bfloat16 ($old). Use the others:" \
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=$usable"
    fi
}
