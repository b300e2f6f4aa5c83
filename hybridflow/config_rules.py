"""The rules between the sections of a configuration: every problem is a line that says how to mend it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybridflow.algorithms import ALGORITHMS
from hybridflow.algorithms.policy_gradient import PolicyGradient, conflicts
from hybridflow.config_sections import GenerationMeshConfig, section_of
from hybridflow.core.config import keys
from hybridflow.core.placement import MeshConfig
from hybridflow.data.envs import EnvironmentConfig
from hybridflow.data.prompts import DataConfig
from hybridflow.workers.env_sampler import ExplorationConfig
from hybridflow.workers.optimizer import OptimizerConfig

if TYPE_CHECKING:
    from hybridflow.config import RunConfig

__all__ = ["all_sections", "conflicts_of"]


OWN = 'give the sampler one of its own, such as pools = {{ learner = 1, envs = {} }}, roles.sampler = "envs"'


def all_sections(config: RunConfig) -> set[str]:
    """The names of all sections that a configuration may have."""
    return {name.split(".")[0] for name, *_ in keys(type(config)) if "." in name} | {*ALGORITHMS}


def conflicts_of(config: RunConfig) -> Iterator[str]:
    """What is wrong between sections, one line each."""
    yield from _section_conflicts(config)
    yield from _placement_conflicts(config)
    method = ALGORITHMS[config.algorithm]
    if config.data is not None and config.environment is None:
        yield from _text_conflicts(config)
        yield from _record_conflicts(config, config.data)
        smallest = method.algorithm.smallest_group(config.method)
        if config.train.group_size < smallest:
            found = f"train.group_size = {config.train.group_size}"
            yield f"{found}: {config.algorithm} compares the responses to one prompt and needs at least {smallest}"
        if config.train.max_refills and smallest == 1:
            found = f"train.max_refills = {config.train.max_refills}"
            yield f"{found}: algorithm = {config.algorithm!r} learns from groups with equal scores too; leave it out"
    if issubclass(method.algorithm, PolicyGradient):
        given = "data" if config.environment is None else "environment"
        yield from conflicts(config.loss, config.kl, method.algorithm.kl_where, given)
    yield from _best_conflicts(config)
    yield from _schedule_conflicts(config)
    if config.evaluation.functions and (config.environment is not None or method.records == "pairs"):
        yield "evaluation.functions: they score responses, but episodes have returns and pairs are told apart; remove them"
    if config.evaluation.options and config.environment is None:
        yield "evaluation.options: they are for the [environment] of evaluations, and this run is on [data]; remove them"
    if config.train.max_refills and config.environment is not None:
        yield "train.max_refills: an [environment] has no groups; leave it out"
    yield from _environment_conflicts(config)
    yield from _offline_conflicts(config)
    yield from _replay_conflicts(config) if config.replays else ()
    if config.train.updates_per_step > 1 and not config.replays:
        yield f"train.updates_per_step: {config.algorithm} learns from fresh samples; use train.epochs or train.minibatches"
    if config.replays and (config.train.epochs > 1 or config.train.minibatches > 1):
        yield f"train.epochs, train.minibatches: {config.algorithm} replays samples; use train.updates_per_step"


def _best_conflicts(config: RunConfig) -> Iterator[str]:
    best = config.checkpoint.keep_best
    if best is None:
        return
    found = f"checkpoint.keep_best = {best!r}"
    if not best.startswith("eval/"):
        yield f'{found}: expected a metric of evaluations, like "eval/score"'
    every, evaluated = config.checkpoint.every, config.evaluation.every
    if not every or not evaluated or every % evaluated:
        wish = "set checkpoint.every to a multiple of evaluation.every"
        yield f"{found}: every checkpoint needs an evaluation to compare by; {wish} (now {every} and {evaluated})"


def _schedule_conflicts(config: RunConfig) -> Iterator[str]:
    """Rollouts that begin before the weights are there that they would be learned with."""
    if config.schedule.kind == "sync":
        if config.loss.correction is None and config.loss.correction_cap is not None:
            yield "loss.correction_cap has no effect without loss.correction; set correction, or remove it"
        return
    found, environment, method = (
        f'schedule.kind = "{config.schedule.kind}"',
        config.environment,
        ALGORITHMS[config.algorithm],
    )
    if environment is None and method.records != "prompts":
        yield f"{found}: {config.algorithm} has no rollouts; remove [schedule]"
    elif environment is not None and not config.replays and config.algorithm not in ("impala", "ppo"):
        yield f"{found}: {config.algorithm} learns from its newest policy's rollouts alone; remove [schedule]"
    elif environment is not None and environment.workers:
        yield f"{found}: environment.workers collect by themselves while others learn; remove [schedule]"
    elif environment is not None and environment.steps_per_rollout == 0:
        yield f"{found}: environment.steps_per_rollout = 0 collects nothing; remove [schedule]"
    elif config.train.max_refills:
        yield f"{found}: train.max_refills rolls out again until enough prompts say something; leave one of both out"
    elif config.runtime.kind == "ray":
        yield from _sampler_alone_conflicts(config, found)


def _sampler_alone_conflicts(config: RunConfig, found: str) -> Iterator[str]:
    """The sampler works while others do, so in processes of its own."""
    if any(config.placement.conflicts(config.algorithm, config.roles(), config.models)):
        return  # told already
    pool, mesh = config.placed.pool_of("sampler"), config.actor.generation_mesh
    others = [role for role in config.roles() if role != "sampler" and config.placed.pool_of(role) == pool]
    if others:
        yield f"{found}: {', '.join(others)} would wait for rollouts on pool {pool.name!r}; {OWN.format(pool.size)}"
    if config.environment is None and config.schedule.kind == "async":
        if config.generation.engine != "hybridflow":
            yield f'{found}: generation.engine = "{config.generation.engine}" serves call after call; use "hybridflow"'
        if mesh.tp * mesh.pp > 1:
            yield f'{found}: actor.generation_mesh: each process serves its own calls; remove it, or use "one_step_off"'


def _environment_conflicts(config: RunConfig) -> Iterator[str]:
    if config.checkpoint.export_every and config.environment is None:
        yield "checkpoint.export_every: only policies in an [environment] are served while they are trained; leave it out"
    environment = config.environment
    yield from _exploration_conflicts(config)
    yield from _net_conflicts(config)
    yield from _memory_conflicts(config)
    if config.critic.input == "state" and (environment is None or not environment.shared):
        yield 'critic.input = "state": needs several agents, environment.id = "pettingzoo:..."; leave it out'
    if config.critic.input == "state" and config.replays:
        yield f'critic.input = "state": {config.algorithm} replays no states; leave it out'
    if environment is not None:
        yield from _worker_conflicts(config, environment)
    if config.algorithm == "q_learning" and environment is not None and environment.steps_per_rollout > 1:
        yield f"environment.steps_per_rollout = {environment.steps_per_rollout}: q_learning learns from each; set it to 1"


def _worker_conflicts(config: RunConfig, environment: EnvironmentConfig) -> Iterator[str]:
    """Env workers that roll out by themselves: who can learn from them, and where they are."""
    method, workers = config.algorithm, environment.workers
    found = f"environment.workers = {workers}"
    if method == "a3c":
        yield from _a3c_conflicts(config, workers)
    elif workers and method != "impala" and not config.replays:
        yield f"{found}: {method} learns from its newest policy's rollouts alone; leave it out, or use a3c or impala"
    if workers > environment.num_envs:
        yield f"{found}: each needs an environment, but environment.num_envs = {environment.num_envs}; raise that"
    if workers and config.runtime.kind == "ray":
        yield from _worker_placement_conflicts(config, workers)


def _a3c_conflicts(config: RunConfig, workers: int) -> Iterator[str]:
    if not workers:
        yield "environment.workers = 0: a3c learns from env workers; set how many, 1 or more"
    if config.critic.optimizer != OptimizerConfig():
        yield "critic.optimizer: a3c has one optimizer, actor.optimizer; remove it"
    if config.critic.input == "state":
        yield 'critic.input = "state": env workers of a3c act on what their critic sees; leave it out'
    for name in ("actor", "critic"):
        if getattr(config, name).net.normalise:
            yield f"{name}.net.normalise: the learner of a3c sees gradients and no observations; leave it out"
    for name in ("minibatches", "epochs"):
        if getattr(config.train, name) > 1:
            yield f"train.{name} = {getattr(config.train, name)}: a3c makes one step of a rollout; leave it out"


def _worker_placement_conflicts(config: RunConfig, workers: int) -> Iterator[str]:
    """The sampler's processes are the env workers, and nobody else waits for them."""
    problems = config.placement.conflicts(config.algorithm, config.roles(), config.models)
    if any(problems):
        return  # told already
    pool, found = config.placed.pool_of("sampler"), f"environment.workers = {workers}"
    others = [role for role in config.roles() if role != "sampler" and config.placed.pool_of(role) == pool]
    if others:
        yield f"placement.roles: {', '.join(others)} would wait for rollouts on pool {pool.name!r}; {OWN.format(workers)}"
    elif pool.size != workers:
        yield f"placement.pools.{pool.name} = {pool.size}: {found} are a process each; make them equal"
    if config.algorithm == "a3c" and config.placed.pool_of("actor").size > 1:
        name, size = config.placed.pool_of("actor").name, config.placed.pool_of("actor").size
        yield f"placement.pools.{name} = {size}: the actor of a3c takes its steps in one process; use 1"


def _net_conflicts(config: RunConfig) -> Iterator[str]:
    for name in ("actor", "critic"):
        if getattr(config, name).net.normalise and config.replays:
            yield f"{name}.net.normalise: {config.algorithm} replays what older statistics scaled otherwise; leave it out"
    if config.actor.net.normalise_returns:
        yield "actor.net.normalise_returns: a policy has no returns; set critic.net.normalise_returns"
    if config.critic.net.normalise_returns and (config.replays or config.algorithm == "a3c"):
        yield f"critic.net.normalise_returns: {config.algorithm} learns from no returns that its critic sees; leave it out"
    for name, model in (("actor", config.actor), ("critic", config.critic)):
        if model.dtype == "bfloat16" and (config.replays or config.algorithm in ("trpo", "q_learning", "a3c")):
            yield f'{name}.dtype = "bfloat16": {config.algorithm} learns in float32; leave it out'


def _memory_conflicts(config: RunConfig) -> Iterator[str]:
    """A memory is unrolled over whole pieces, in the order of their steps."""
    actor, critic = config.actor.net.kind, config.critic.net.kind
    for name, net in (("actor", config.actor.net), ("critic", config.critic.net)):
        if net.memory and config.algorithm in ("sac", "td3", "ddpg", "trpo", "q_learning"):
            yield f'{name}.net.kind = "{net.kind}": {config.algorithm} learns from single steps; use "mlp" or "cnn"'
            return
    if config.critic.net.memory and critic != actor:
        found = f'critic.net.kind = "{critic}", but actor.net.kind = "{actor}"'
        yield f'{found}: a critic starts from the actor\'s memory; make them equal, or the critic\'s "mlp" or "cnn"'
    elif config.critic.net.memory and config.critic.input == "state":
        yield f'critic.net.kind = "{critic}": critic.input = "state" forgets nothing; use "mlp"'
    elif critic == "attention" and config.critic.net.context != config.actor.net.context:
        found = f"critic.net.context = {config.critic.net.context}, but actor.net.context = {config.actor.net.context}"
        yield f"{found}: both see the same past observations; make them equal"


def _sequence_conflicts(config: RunConfig) -> Iterator[str]:
    """Replayed sequences: of networks with a memory alone, and each from the memory that it was collected with."""
    replay, net, environment = config.replay, config.actor.net, config.environment
    found = f"replay.sequence = {replay.sequence}"
    if config.algorithm != "dqn":
        yield from [f"{found}: {config.algorithm} learns from single steps; leave it out"] if replay.sequence > 1 else []
    elif net.memory and replay.sequence == 1:
        yield f'actor.net.kind = "{net.kind}": dqn learns a memory from sequences; set replay.sequence = 20, for instance'
    elif replay.sequence > 1 and not net.memory:
        yield f'{found}: actor.net.kind = "{net.kind}" learns from single steps; leave it out, or use "gru"'
    elif replay.sequence > 1:
        if config.dqn.atoms is not None:
            yield f"dqn.atoms = {config.dqn.atoms}: with {found} dqn learns means; leave atoms, v_min and v_max out"
        if replay.dataset is not None:
            yield f"replay.dataset: no recorded step has the memory that {found} begins with; leave it out"
        elif environment is not None and environment.steps_per_rollout < replay.sequence:
            steps = f"environment.steps_per_rollout = {environment.steps_per_rollout}"
            yield f"{found}: no sequence is longer than a rollout, and {steps}; raise it to a multiple of {replay.sequence}"
        if replay.capacity < replay.sequence:
            yield f"{found}, but replay.capacity = {replay.capacity}: there is no room for one; raise it"


def _replay_conflicts(config: RunConfig) -> Iterator[str]:
    yield from _sequence_conflicts(config)
    replay, found = config.replay, f"replay.samples_per_insert = {config.replay.samples_per_insert}"
    if replay.samples_per_insert is not None and config.train.updates_per_step > 1:
        yield f"{found}: it says how many updates follow a rollout, and so does train.updates_per_step; leave one out"
    elif config.environment is not None and config.environment.steps_per_rollout and config.num_updates == 0:
        yield f"{found}: the whole run draws less than one replay.batch_size = {replay.batch_size}; raise it or train.steps"
    if config.runtime.kind == "local" and replay.shards > 1:
        yield f'replay.shards = {replay.shards}: needs worker processes; set runtime.kind = "ray" and placement.pools'


def _exploration_conflicts(config: RunConfig) -> Iterator[str]:
    """Discrete actions are explored by chance, continuous ones by noise."""
    noisy, default = config.algorithm in ("td3", "ddpg"), ExplorationConfig()
    for name in ("epsilon_end", "epsilon_decay_steps") if noisy else ("noise",):
        if getattr(config.exploration, name) != getattr(default, name):
            how = "exploration.noise" if noisy else "exploration.epsilon_end and epsilon_decay_steps"
            yield f"exploration.{name}: {config.algorithm} has no use for it and explores by {how}; leave it out"


def _section_conflicts(config: RunConfig) -> Iterator[str]:
    given = [name for name in ("data", "environment") if getattr(config, name) is not None]
    inputs = ALGORITHMS[config.algorithm].inputs
    if len(given) != 1:
        yield f"needs {' or '.join(f'[{name}]' for name in inputs)}, one of them; found {' and '.join(given) or 'none'}"
    elif given[0] not in inputs:
        yield f"algorithm = {config.algorithm!r} runs on {' or '.join(f'[{name}]' for name in inputs)}, not on [{given[0]}]"
    else:
        of_ray = {"placement", "recovery"}  # see _sections_of_ray
        for name in sorted((config.model_fields_set & all_sections(config)) - config.sections() - of_ray):
            yield f"[{name}] is set, but {config.algorithm} on [{given[0]}] doesn't read it; remove the section"


def _placement_conflicts(config: RunConfig) -> Iterator[str]:
    for name in dict.fromkeys(map(section_of, config.cuts)):
        if config.environment is not None:
            yield f"{name}.mesh: networks for environments can't be cut; remove it, the pool is data-parallel"
        elif config.runtime.kind == "local":
            yield f'{name}.mesh: a cut model needs several processes; set runtime.kind = "ray" and placement.pools'
    if config.runtime.kind == "local" and config.actor.generation_mesh != GenerationMeshConfig():
        yield 'actor.generation_mesh: needs several processes; set runtime.kind = "ray", placement.pools and actor.mesh'
    yield from _shard_conflicts(config)
    yield from _chunks_conflicts(config)
    for name, scorer in (("reward", config.reward), ("cost", config.cost)):
        if scorer.model is None and scorer.mesh != MeshConfig():
            yield f"{name}.mesh: functions aren't cut; remove it, or set {name}.model to a reward model"
        if scorer.model is None and scorer.token_budget is not None:
            yield f"{name}.token_budget: functions have no microbatches; remove it, or set {name}.model to a reward model"
    if config.runtime.kind == "ray":
        problems = list(config.placement.conflicts(config.algorithm, config.roles(), config.models))
        yield from problems or dict.fromkeys((*_cut_conflicts(config), *_shard_ranks_conflicts(config)))
        yield from [] if problems else (*_generation_conflicts(config), *_pool_of_replay_conflicts(config))
        yield from [] if problems else _auction_conflicts(config)
    else:
        yield from (*dict.fromkeys(_shard_ranks_conflicts(config)), *_auction_conflicts(config))
    yield from _sections_of_ray(config)


def _auction_conflicts(config: RunConfig) -> Iterator[str]:
    if config.threads == "auction" and len(config.placed.pools) < 2:
        hint = 'set runtime.kind = "ray" and placement.pools, or give threads a number'
        yield f'threads = "auction": pools of worker processes bid, and there is only one pool; {hint}'


def _sections_of_ray(config: RunConfig) -> Iterator[str]:
    if config.runtime.kind == "ray":
        return
    for name, found in (("placement", "runs every role in this process"), ("recovery", "has no worker processes to lose")):
        if name in config.model_fields_set:
            yield f'{name}: runtime.kind = "local" {found}; set runtime.kind = "ray" or remove it'


def _shard_conflicts(config: RunConfig) -> Iterator[str]:
    trained = {section_of(role): model for role, model in config.trained_sections.items()}
    for name, model in trained.items() if config.environment is not None else ():
        if model.mesh.shard == "fsdp":
            yield f'{name}.mesh.shard = "fsdp" shards decoders, not networks for environments; use "zero1" or "none"'
    if config.actor.mesh.shard == "fsdp" and config.generation.engine == "vllm" and config.runtime.kind == "ray":
        yield 'actor.mesh.shard = "fsdp": vLLM reads whole weights; use "zero1", or generation.engine = "hybridflow"'


def _chunks_conflicts(config: RunConfig) -> Iterator[str]:
    for name, mesh in {section_of(role): model.mesh for role, model in config.trained_sections.items()}.items():
        if mesh.chunks > 1 and mesh.pp == 1:
            yield f"{name}.mesh.chunks = {mesh.chunks}: one process has no pipeline; set {name}.mesh.pp, or remove it"


def _cut_conflicts(config: RunConfig) -> Iterator[str]:
    """A pool holds a whole number of models, and of groups that share out the tokens of a sequence."""
    for name, (tp, pp, cp) in config.cuts.items():
        pool, size = config.placed.pool_of(name), tp * pp * cp
        if pool.size % size:
            shape, what = (f" x cp {cp}", "share one sequence") if cp > 1 else ("", "hold one model")
            found = f"{section_of(name)}.mesh: tp {tp} x pp {pp}{shape} = {size} processes {what}"
            yield f"{found}, but pool {pool.name!r} has {pool.size} workers; make it a multiple of {size}"


def _shard_ranks_conflicts(config: RunConfig) -> Iterator[str]:
    """The ranks that hold the same parameters are a whole number of groups that share them out."""
    for role, model in config.trained_sections.items():
        mesh, found = model.mesh, f"{section_of(role)}.mesh.shard_ranks"
        if mesh.shard_ranks and mesh.shard == "none":
            yield f'{found}: shard = "none" shares nothing out; remove it, or set {section_of(role)}.mesh.shard'
        elif mesh.shard_ranks and config.runtime.kind == "local":
            yield f'{found}: needs several processes; set runtime.kind = "ray" and placement.pools, or remove it'
        elif mesh.shard_ranks and (pool := config.placed.pool_of(role)).size % (mesh.tp * mesh.pp * mesh.cp) == 0:
            copies = pool.size // (mesh.tp * mesh.pp)
            fitting = [number for number in range(2, copies + 1) if copies % number == 0]
            held = f"{copies} of pool {pool.name!r} hold the same parameters"
            fix = f"use {' or '.join(map(str, fitting))}" if fitting else "remove it"
            yield from () if mesh.shard_ranks in fitting else (f"{found} = {mesh.shard_ranks}: {held}; {fix}",)


def _generation_conflicts(config: RunConfig) -> Iterator[str]:
    """Each copy of the model that draws responses is held by a whole number of processes."""
    mesh, name = config.actor.generation_mesh, "actor.generation_mesh"
    size = mesh.tp * mesh.pp
    if size == 1 or "sampler" not in config.roles():
        return
    if config.environment is not None:
        yield f"{name}: networks for environments can't be cut; remove it"
        return
    found = f"{name}: tp {mesh.tp} x pp {mesh.pp} = {size} processes draw responses together"
    pool = config.placed.pool_of("sampler")
    if config.generation.engine != "hybridflow":
        yield f"{name}: generation.engine = {config.generation.engine!r} runs in one process; remove it"
    elif pool.size % size:
        yield f"{found}, but pool {pool.name!r} has {pool.size} workers; make it a multiple of {size}"


def _offline_conflicts(config: RunConfig) -> Iterator[str]:
    replay, environment = config.replay, config.environment
    if environment is None or environment.steps_per_rollout:
        return
    found = "environment.steps_per_rollout = 0"
    if environment.workers:
        yield f"{found}: nothing is collected, so environment.workers have nothing to do; leave them out"
    if not config.replays:
        yield f"{found}: {config.algorithm} learns from what it collects; set it to 1 or more"
    elif replay.dataset is None:
        yield f"{found}: nothing is collected, so what is learned from has to be in replay.dataset; set one of them"
    elif replay.samples_per_insert is not None:
        yield f"{found}: nothing is collected, so replay.samples_per_insert has no effect; leave it out"


def _pool_of_replay_conflicts(config: RunConfig) -> Iterator[str]:
    if config.replays and config.replay.shards > (pool := config.placed.pool_of("replay")).size:
        found = f"replay.shards = {config.replay.shards}, but pool {pool.name!r} of role replay has {pool.size} workers"
        yield f"{found}; make the pool larger, or name another one in placement.roles.replay"


def _text_conflicts(config: RunConfig) -> Iterator[str]:
    generation = config.generation
    if generation.engine == "vllm" and generation.precision != "full":
        yield f'generation.precision = {generation.precision!r} needs generation.engine = "hybridflow"'
    if generation.precision == "int8" and config.torch_device.type != "cpu":
        yield f'generation.precision = "int8" runs on CPUs only, and this run is on {config.torch_device}; use "bfloat16"'
    if config.actor.model is None and config.actor.fresh is None:
        yield '[actor] needs model = "..." (hybridflow models list) or a section [actor.fresh]'
    if "teacher" in config.sections() and config.teacher.model is None:
        yield f'[teacher] needs model = "...", which {config.algorithm} learns from'


def _record_conflicts(config: RunConfig, data: DataConfig) -> Iterator[str]:
    """Methods on pairs need pairs, and others can't use them."""
    on_pairs, given = ALGORITHMS[config.algorithm].records == "pairs", "task" if data.task is not None else "prompts"
    if on_pairs and data.pairs is None:
        yield f"{config.algorithm} learns from data.pairs, found data.{given}; hybridflow rank makes pairs from samples"
    if not on_pairs and data.pairs is not None and "data" in ALGORITHMS[config.algorithm].inputs:
        yield f"{config.algorithm} needs data.task or data.prompts, found data.pairs, which are for reward_model and dpo"
    if on_pairs and config.train.group_size > 1:
        yield f"train.group_size = {config.train.group_size}: {config.algorithm} samples no responses; remove it"
    if config.algorithm == "dpo" and config.dpo.kind == "kto" and config.train.prompts_per_step < 2:
        yield 'train.prompts_per_step = 1: dpo.kind = "kto" compares with responses to other prompts, so it needs 2 or more'
    reference, actor = config.dtype_of(config.reference), config.dtype_of(config.actor)
    if config.algorithm == "dpo" and config.reference.model is None and reference != actor:
        found = f"reference.dtype = {reference!r}, but the actor has {actor!r}"
        yield f"{found}: dpo starts from a reference that is equal to the actor; leave reference.dtype out"
