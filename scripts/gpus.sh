# SPDX-License-Identifier: Apache-2.0
# For the scripts that choose between GPUs and the CPU; they source it, and each has a function `fail`.
# BAPO_DEVICE_ROOT is a folder to look at in place of /, for the tests.

count_gpus() {  # sets gpus to the number of GPUs that nvidia-smi lists; fails where a driver is there and it lists none
    local said sign
    said=$(nvidia-smi -L 2>&1 || true)
    said=${said#*gpus.sh: line *: }  # which bash puts before "nvidia-smi: command not found"
    gpus=$(grep -c '^GPU' <<<"$said" || true)
    if [ "$gpus" != 0 ] || [ "${VERL_PLATFORM:-}" = cpu ]; then return; fi
    # In a container without nvidia-smi, a run would otherwise train on the CPU beside idle GPUs.
    for sign in /dev/nvidia0 /proc/driver/nvidia/version; do
        [ ! -e "${BAPO_DEVICE_ROOT:-}$sign" ] || fail "$sign is here, and nvidia-smi lists no GPU (${said%%$'\n'*})." \
            "Mend or install nvidia-smi (in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility), or set" \
            "VERL_PLATFORM=cpu to use this machine's CPU."
    done
}
