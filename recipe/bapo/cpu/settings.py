"""What a run on a machine without a GPU needs of its environment and its config. Imports nothing."""

# Everything a process of a CPU run needs in its environment.
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "TQ_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engine for cuda and npu only
}

# What the CPU path needs of the config, before the user's own overrides. Why each: docs/cpu.md.
OVERRIDES = (
    "trainer.device=cpu",
    "++ray_kwargs.ray_init.num_gpus=16",
    "ray_kwargs.ray_init.num_cpus=16",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "data.dataloader_num_workers=0",
    "reward.num_workers=1",
    "actor_rollout_ref.model.use_remove_padding=False",
    "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.free_cache_engine=False",
    "++actor_rollout_ref.rollout.enable_sleep_mode=False",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=recipe.bapo.cpu.checkpoint_engine",
    "++actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=recipe.bapo.cpu.vllm.CPUWorkerExtension",
)
