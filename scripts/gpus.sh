# SPDX-License-Identifier: Apache-2.0
# Scripts that choose between GPUs and the CPU source this file. Each of them defines a function `fail`.
# The tests set BAPO_DEVICE_ROOT to a folder that is searched instead of /.

count_gpus() {  # set gpus to the number of GPUs that nvidia-smi lists; fail if there is a driver but it lists none
    local said sign
    said=$(nvidia-smi -L 2>&1 || true)
    said=${said#*gpus.sh: line *: }  # remove what bash puts before "nvidia-smi: command not found"
    gpus=$(grep -c '^GPU' <<<"$said" || true)
    if [ "$gpus" != 0 ] || [ "${VERL_PLATFORM:-}" = cpu ]; then return; fi
    # In a container without nvidia-smi, a run would otherwise train on the CPU while the GPUs are idle.
    for sign in /dev/nvidia0 /proc/driver/nvidia/version; do
        [ ! -e "${BAPO_DEVICE_ROOT:-}$sign" ] || fail "$sign is here, and nvidia-smi lists no GPU (${said%%$'\n'*})." \
            "Mend or install nvidia-smi (in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility), or set" \
            "VERL_PLATFORM=cpu to use this machine's CPU."
    done
}
