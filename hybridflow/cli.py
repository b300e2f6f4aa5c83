"""The ``hybridflow`` program.

Exit codes: 0 done, 1 a worker process failed, ``doctor`` found a problem or a policy is over its budget of time, 2 a user's
mistake (told in one line each), 130 interrupted, 143 asked to end (SIGTERM), after a step that was saved if it was in time.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridflow.core.errors import ConfigError, HybridFlowError, ResourceError, UserError, WorkerError

__all__ = ["main"]

# Imports of what a command needs are inside its function, so that every command starts as fast as it can.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    parser = _parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return 0
    options, rest = parser.parse_known_args(arguments)
    if rest and not getattr(options, "takes_overrides", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.overrides = rest
    try:
        return int(options.run(options) or 0)
    except ConfigError as error:
        return _fail(*error.problems)
    except UserError as error:
        return _fail(str(error))
    except WorkerError as error:
        _fail(*([MEMORY] if _out_of_memory(error) else []), str(error))
        return 1
    except HybridFlowError as error:
        return _fail(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        return 130
    except (MemoryError, RuntimeError, OSError) as error:
        if not (exhausted := _exhausted(error)):
            raise
        return _fail(str(ResourceError(exhausted)))


RESUME = "go on from a checkpoint, by default the newest; auto: the newest that is whole or, if there is none, the start"

REPLAY = "repeat a run on Ray whose result depended on what came first, bit for bit, in another run_dir"

OVERRIDE = "any key of the configuration can be overridden: --section.key value (hybridflow keys lists them)"

MEMORY = (
    "out of memory: lower train.token_budget (the result stays the same), generation.max_slots, generation.kv_cache_gb or "
    'train.prompts_per_step, or set actor.dtype = "bfloat16" or actor.activation_checkpointing = true'
)


BENCH_COLUMNS = """\
columns (medians of three repetitions; the last four of a further, profiled pass):
  tok/s      new tokens a second of wall time
  tok/CPU-s  new tokens a second of processor time, summed over threads: steady on a machine with other work
  limit      tok/CPU-s if prompts took FLOPs / peak and a decode step max(weight bytes / bandwidth, FLOPs / peak),
             peak and bandwidth as measured between the repetitions, and all else took no time
  share      tok/CPU-s as a share of the limit
  linear     share of the time in linear layers, the head included
  attend     ... in attention and its key-value cache
  sample     ... from logits to tokens
  rest       ... in norms, rotary positions, activations and bookkeeping
"""


AXES = ("devices", "cluster", "model", "lengths", "schedule")
FILES = ("write", "picture", "timeline")
MAPPING = ("model", "lengths", "schedule", "objective", "what_if", *FILES)
PLAN_EXAMPLES = """\
examples:
  hybridflow plan run.toml --explain-memory
  hybridflow plan run.toml --cluster a100-80g:16x8 --model llama-7b --lengths 1024+1024
  hybridflow plan run.toml --cluster h100:2x8 --picture plan.html --write planned.toml
  hybridflow plan run.toml --cluster a100-80g:1x8 --what-if devices=2,4,8,16,32
  hybridflow plan run.toml --cluster a100-80g:1x8 --what-if train.prompts_per_step=64,128,256
  hybridflow plan runs/reverse --compare --calibrate
kinds of machines: a100-80g, h100, h200, l40s, cpu, and here (what hybridflow probe has measured)
what a task's seconds are made of:
  compute     matrix products, or weights read                 prefill     prompts of a rollout
  launch      kernels of layers that start and end             copy        weights packed for a rollout, on a CPU
  recompute   forward passes that are made once more           decode      weights and cache read, products, for each token
  imbalance   stages of a pipeline that are longer than others steps       what each decode step costs besides
  bubble      stages of a pipeline that wait                   rows        what each row in a decode step costs besides
  pipeline    messages between stages                          transition  weights on their way to the sampler
  tensor      sums of tensor parallelism                       transfer    inputs from other pools
  data        gradients and weights between copies             optimizer   its states through memory
  call        what each call and each update costs besides     own         tasks without a model
"""


DISK = "the disk is full; what was saved before is untouched. Free some space, then go on with train ... --resume auto"


def _exhausted(error: Exception) -> str:
    """What to do about it, if there is too little memory or room on a disk."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename}: {DISK}" if error.filename else DISK
    return MEMORY if _out_of_memory(error) else ""


def _out_of_memory(error: Exception) -> bool:
    """torch tells it as a RuntimeError of its own kind on GPUs and as a plain one on processors."""
    told = ("can't allocate memory", "out of memory")
    return isinstance(error, MemoryError) or any(text in str(error).lower() for text in told)


def _fail(*lines: str) -> int:
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybridflow", description="RLHF and RL, from a laptop to a cluster.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[Any], int | None], text: str, overrides: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run, takes_overrides=overrides)
        return sub

    _add_running(command)
    _add_talking(command)
    _add_serving(command)
    _add_showing(command)
    _add_bench(command)
    return parser


def _add_running(command: Callable[..., argparse.ArgumentParser]) -> None:
    train = command("train", _train, f"train as a TOML file says; {OVERRIDE}", overrides=True)
    train.add_argument("config", type=Path, help="TOML file")
    train.add_argument("--resume", nargs="?", const="latest", metavar="CHECKPOINT", help=RESUME)
    train.add_argument(
        "--restarts", type=int, default=0, metavar="N", help="go on from the newest checkpoint when the run dies, so often"
    )
    train.add_argument("--replay", type=Path, metavar="RUN", help=REPLAY)
    evaluate = command("eval", _eval, f"score a configuration's model, or a run's, on held-out data; {OVERRIDE}", True)
    evaluate.add_argument("source", type=Path, help="TOML file or run directory")
    evaluate.add_argument("--episodes", type=int, metavar="N", help="of an environment; default: evaluation.limit")
    evaluate.add_argument("--json", action="store_true")
    play = command("play", _play, f"watch what a run has learned in an environment; {OVERRIDE}", overrides=True)
    play.add_argument("source", type=Path, metavar="RUN", help="run directory")
    shown = play.add_mutually_exclusive_group()
    shown.add_argument("--terminal", action="store_true", help="as text, or as pictures of coloured blocks; the default")
    shown.add_argument("--video", type=Path, metavar="FILE", help="write a video, .mp4 or .gif")
    shown.add_argument("--window", action="store_true", help="in a window of the environment's own")
    play.add_argument("--episodes", type=int, default=1, metavar="N", help="default: 1")
    play.add_argument(
        "--first", type=int, default=0, metavar="I", help="number of the first episode, as in eval; default: 0"
    )
    export = command("export", _export, "write what a run in an environment has trained as an ONNX file, and check that")
    export.add_argument("source", type=Path, metavar="RUN", help="run directory")
    export.add_argument("file", type=Path, metavar="FILE.onnx")
    rank = command(
        "rank", _rank, f"make preference pairs: sample responses, score them, keep best and worst; {OVERRIDE}", True
    )
    rank.add_argument("source", type=Path, help="TOML file with prompts and a reward, or run directory")
    rank.add_argument("--out", type=Path, required=True, help="file of pairs to write, .jsonl; data.pairs reads it")
    rank.add_argument("--count", type=int, help="prompts to sample; default: every prompt once")
    record = command("record", _record, "write episodes of a run's policy as a Minari dataset, for replay.dataset")
    record.add_argument("source", type=Path, help="run directory")
    record.add_argument("--out", type=Path, required=True, help="new folder, with a name that ends with -v0 or so")
    record.add_argument("--steps", type=int, default=10_000, help="whole episodes are played until there are so many")
    record.add_argument("--random", type=float, default=0.0, metavar="P", help="chance of a random action, default 0")
    _add_chaos(command)
    command("demo", _demo, f"teach a real language model to add, in minutes; {OVERRIDE}", overrides=True)
    verify = command("verify-resume", _verify_resume, f"whether a TOML file's run resumes exactly; {OVERRIDE}", True)
    verify.add_argument("config", type=Path, help="TOML file")
    verify.add_argument("--at", type=int, default=2, metavar="N", help="steps before the break, default 2")
    verify.add_argument("--steps", type=int, default=4, metavar="M", help="steps in all, default 4")
    ledger = command("ledger", _ledger, "what became of every sample of a run; exit code 1 if one is lost or counts twice")
    ledger.add_argument("source", type=Path, metavar="RUN", help="run directory")
    ledger.add_argument("--json", action="store_true")
    auction = command("auction", _auction, "who bid what for which resources of a run, who got them, and what that saved")
    auction.add_argument("action", choices=("explain",))
    auction.add_argument("source", type=Path, metavar="RUN", help="run directory")
    auction.add_argument("--json", action="store_true")
    report = command("report", _report, "write one HTML page about one or several runs")
    report.add_argument("runs", type=Path, nargs="+", help="run directories")
    report.add_argument("--output", type=Path, help="default: report.html in the first run")


def _add_chaos(command: Callable[..., argparse.ArgumentParser]) -> None:
    chaos = command("chaos", _chaos, f"train as a TOML file says, once in peace and once under faults; {OVERRIDE}", True)
    chaos.add_argument("config", type=Path, help="TOML file")
    chaos.add_argument("--seed", dest="fault_seed", type=int, default=1, help="of the schedule of faults; default: 1")
    chaos.add_argument("--faults", type=int, default=0, metavar="N", help="default: one of each kind")
    chaos.add_argument(
        "--kinds", default="", metavar="A,B,C", help="default: all that can befall the run; docs/reliability.md has them"
    )
    chaos.add_argument("--nodes", type=int, default=0, metavar="N", help="run on so many Ray nodes on this machine")
    chaos.add_argument("--out", type=Path, metavar="FOLDER", help="where both runs are written; default: RUN_DIR-chaos")
    chaos.add_argument("--json", action="store_true")


def _add_talking(command: Callable[..., argparse.ArgumentParser]) -> None:
    generate = command("generate", _generate, "responses of a model to prompts")
    generate.add_argument("model", help="name, Hugging Face folder or run directory")
    generate.add_argument("prompts", nargs="+")
    generate.add_argument("--template", default="plain", help='"plain", "chat" or a text with {prompt}')
    generate.add_argument("--count", type=int, default=1, help="responses to each prompt")
    generate.add_argument("--json", action="store_true")
    chat = command("chat", _chat, "talk to a model")
    chat.add_argument("model", help="name, Hugging Face folder or run directory")
    chat.add_argument("--system", help="system message")
    for sub in (generate, chat):
        sub.add_argument("--max-new-tokens", type=int, default=128)
        sub.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
        sub.add_argument("--seed", type=int, default=1)


def _add_serving(command: Callable[..., argparse.ArgumentParser]) -> None:
    serve = command(
        "serve-rewards", _serve_rewards, "serve reward functions over HTTP, for reward.functions to name by URL"
    )
    serve.add_argument(
        "functions", nargs="+", metavar="FUNCTION", help='"package.module:function" or "path/file.py:function"'
    )
    serve.add_argument(
        "--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone; there is no authentication"
    )
    serve.add_argument("--port", type=int, default=8000, help="default: 8000; 0: a free one")
    serve.add_argument("--timeout-s", type=float, default=10.0, help="a call that takes longer is killed; default: 10")
    serve.add_argument("--workers", type=int, help="processes; default: as many as there are processors, at most 4")
    secret = "an environment variable that functions get although it is called like a secret; may be given several times"
    serve.add_argument("--secret", action="append", default=[], metavar="NAME", help=secret)

    served = command("serve", _serve, "serve the policy of a run in an environment over HTTP, also while it is trained")
    served.add_argument("policy", type=Path, metavar="POLICY", help="run directory")
    served.add_argument("--follow", action="store_true", help="take every policy that the run exports, as it comes")
    served.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone; no authentication")
    served.add_argument("--port", type=int, default=8001, help="default: 8001; 0: a free one")
    late = "an answer is due so long after the request; nothing is answered later; default: 8"
    served.add_argument("--budget-ms", type=float, default=8.0, help=late)
    served.add_argument("--max-batch", type=int, default=64, help="observations of a forward and a request; default: 64")
    served.add_argument("--max-connections", type=int, default=64, help="further ones are told busy; default: 64")


def _add_showing(command: Callable[..., argparse.ArgumentParser]) -> None:
    for name, text in (
        ("algorithms", "the algorithms and the roles that each needs"),
        ("tasks", "the built-in tasks"),
        ("keys", "every key of a configuration, its default and its meaning"),
        ("doctor", "what this machine has, what is missing, how to fix it"),
    ):
        sub = command(name, _show, text)
        sub.set_defaults(name=name)
        sub.add_argument("--json", action="store_true")
    graph = command("graph", _graph, f"which role runs where, and what one step of a TOML file calls; {OVERRIDE}", True)
    graph.add_argument("config", type=Path, help="TOML file")
    form = graph.add_mutually_exclusive_group()
    form.add_argument("--json", dest="form", action="store_const", const="json", default="text")
    form.add_argument("--dot", dest="form", action="store_const", const="dot", help="for Graphviz")
    form.add_argument("--html", type=Path, metavar="FILE", help="write a page with a picture")
    reshard = command("reshard", _reshard, "who holds and sends which weights when training becomes generation")
    reshard.add_argument("--train", required=True, metavar="P-T-D", help="pipeline, tensor and data parallelism: 1-4-2")
    reshard.add_argument(
        "--generate", required=True, metavar="P-T-M-D", help="the same of generation, with replicas in a block: 1-2-2-2"
    )
    strategies = ("hybridflow", "vanilla", "gather_all", "broadcast", "publish")
    reshard.add_argument("--strategy", choices=strategies, default="hybridflow", help="default: hybridflow")
    reshard.add_argument(
        "--model", default="llama-7b", help="llama-7b, -13b, -34b, -70b, or a model that has its sizes; default: llama-7b"
    )
    dtypes = ("float32", "bfloat16")
    reshard.add_argument("--dtype", choices=dtypes, default="bfloat16", help="of the weights; default: bfloat16")
    reshard.add_argument("--generation-dtype", choices=dtypes, help="default: that of the weights")
    reshard.add_argument("--json", action="store_true")
    _add_planning(command)
    measured = "measure this machine for the planner: products, memory, what two processes send each other"
    probe = command("probe", _probe, measured)
    probe.add_argument("--json", action="store_true")
    tried = f"measure what a TOML file's tasks take here, at several sizes, or show what is known; {OVERRIDE}"
    profile = command("profile", _profile, tried, overrides=True)
    profile.add_argument("source", metavar="CONFIG", help="TOML file; or show: print what was measured on this machine")
    profile.add_argument("--json", action="store_true")
    models = command("models", _models, "list, add and find models")
    models.add_argument("action", choices=("list", "add", "show", "path"), nargs="?", default="list")
    models.add_argument("model", nargs="?")
    models.add_argument("--json", action="store_true")


def _add_planning(command: Callable[..., argparse.ArgumentParser]) -> None:
    plan = command(
        "plan", _plan, f"what a TOML file needs and where it runs best, without loading a model; {OVERRIDE}", True
    )
    plan.formatter_class = argparse.RawDescriptionHelpFormatter
    plan.epilog = PLAN_EXAMPLES
    plan.add_argument("source", type=Path, help="TOML file, or run directory")
    asked = plan.add_mutually_exclusive_group(required=True)
    explained = "bytes of weights, gradients, optimizer, activations, caches and buffers by role, and FLOPs of a step"
    asked.add_argument("--explain-memory", action="store_true", help=explained)
    asked.add_argument(
        "--cluster",
        metavar="KIND:MACHINESxDEVICES",
        help="the best device mapping on such machines, or those of a TOML file",
    )
    asked.add_argument(
        "--compare", action="store_true", help="seconds of a run's tasks, as predicted and as it took them here"
    )
    plan.add_argument(
        "--calibrate", action="store_true", help="with --compare: fit the planner's constants for this machine to the run"
    )
    given = plan.add_argument_group("with --cluster")
    given.add_argument("--model", metavar="NAME", help="plan as if every role had a model of this size, like llama-7b")
    tokens = "mean tokens of a row; 1024+512~200: deviating by 200; or a run directory: as they were there"
    given.add_argument("--lengths", metavar="PROMPT+RESPONSE", help=tokens)
    given.add_argument(
        "--schedule", choices=("sync", "async"), help="async: rollouts of the next step run beside learning; default: sync"
    )
    given.add_argument(
        "--objective", choices=("throughput", "price"), help="price: the cheapest token, by prices like a100-80g:2x8@1.5"
    )
    given.add_argument(
        "--what-if", metavar="KEY=A,B,C", help=f"a table for values of {', '.join(AXES)} or a key of the configuration"
    )
    given.add_argument("--write", type=Path, metavar="FILE", help="write the TOML file with its placement and meshes")
    given.add_argument("--picture", type=Path, metavar="FILE", help="write a page that shows who runs when")
    given.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write that as a Chrome trace, like a run's timeline.json"
    )
    plan.add_argument("--json", action="store_true")


def _add_bench(command: Callable[..., argparse.ArgumentParser]) -> None:
    bench = command("bench", _bench, "measure the rollout engine on this machine against the limit of its processor")
    bench.formatter_class = argparse.RawDescriptionHelpFormatter
    bench.epilog = BENCH_COLUMNS
    bench.add_argument("what", choices=("rollout",))
    bench.add_argument(
        "model",
        nargs="?",
        help="name, Hugging Face folder or run directory; default: random ones of 5M, 20M, 100M",
    )
    for name, default, text in (
        ("--prompts", 64, "distinct prompts"),
        ("--group", 4, "responses to each"),
        ("--prompt-tokens", 24, "length of a prompt"),
        ("--new-tokens", 32, "length of a response"),
    ):
        bench.add_argument(name, type=int, default=default, help=f"{text}; default: {default}")
    bench.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    bench.add_argument("--precision", choices=("full", "bfloat16", "int8"), default="full", help="of the engine")
    bench.add_argument("--threads", type=int, help="default: torch's, usually all cores")
    bench.add_argument("--json", action="store_true")
    latency = command(
        "bench-policy", _bench_policy, "measure how long a policy takes from an observation to its action, in milliseconds"
    )
    latency.add_argument("source", type=Path, metavar="RUN", help="run directory")
    latency.add_argument(
        "--budget-ms", type=float, default=8.0, metavar="MS", help="exit code 1 if p99.9 is over it; default: 8"
    )
    latency.add_argument("--steps", type=int, default=10_000, metavar="N", help="steps to measure; default: 10000")
    latency.add_argument("--json", action="store_true")


def _train(options: Any) -> int:
    if options.replay is not None:
        return _replay(options)
    if options.restarts:
        return _supervise(options)
    from hybridflow.config import load_config
    from hybridflow.launch import train

    return train(load_config(options.config, options.overrides), options.resume)


def _replay(options: Any) -> int:
    from hybridflow.arrivals import read_recording
    from hybridflow.config import load_config
    from hybridflow.launch import train

    if options.resume is not None or options.restarts:
        raise UserError("train: --replay repeats a run from its start on; leave out --resume and --restarts")
    config = load_config(options.config, options.overrides)
    return train(config, recording=read_recording(options.replay, config))


def _supervise(options: Any) -> int:
    from hybridflow.supervise import supervise

    if options.restarts < 0:
        raise UserError(f"train: --restarts {options.restarts}: expected at least 0")
    command = [sys.executable, "-m", "hybridflow.cli", "train", str(options.config), *options.overrides]
    first = [] if options.resume is None else ["--resume", options.resume]
    return supervise(
        [*command, *first], [*command, "--resume", "auto"], options.restarts, lambda line: print(line, file=sys.stderr)
    )


def _chaos(options: Any) -> int:
    from hybridflow.commands.chaos import Request, chaos

    kinds = [kind for kind in options.kinds.split(",") if kind]
    given = (options.config, options.overrides, options.fault_seed, options.faults, kinds, options.nodes, options.out)
    return chaos(Request(*given), options.json)


def _eval(options: Any) -> None:
    from hybridflow.commands.evaluate import evaluate

    evaluate(options.source, options.overrides, options.json, options.episodes)


def _play(options: Any) -> None:
    from hybridflow.commands.play import play

    if options.episodes < 1 or options.first < 0:
        raise UserError(f"play: --episodes {options.episodes} --first {options.first}: expected at least 1, and 0 or more")
    episodes = range(options.first, options.first + options.episodes)
    play(options.source, options.overrides, episodes, options.video, options.window)


def _export(options: Any) -> None:
    from hybridflow.commands.export import export

    export(options.source, options.file)


def _rank(options: Any) -> None:
    from hybridflow.commands.rank import rank

    rank(options.source, options.overrides, options.out, options.count)


def _record(options: Any) -> None:
    from hybridflow.commands.record import record

    record(options.source, options.out, options.steps, options.random)


def _demo(options: Any) -> int:
    from hybridflow.commands.demo import demo

    return demo(options.overrides)


def _report(options: Any) -> None:
    from hybridflow.commands.plan import predicted
    from hybridflow.telemetry.report import write_report

    print(write_report(options.runs, options.output or options.runs[0] / "report.html", predicted))


def _verify_resume(options: Any) -> int:
    from hybridflow.commands.verify_resume import verify_resume
    from hybridflow.config import load_config

    return verify_resume(load_config(options.config, options.overrides), options.at, options.steps)


def _ledger(options: Any) -> int:
    from hybridflow.commands.ledger import ledger

    return ledger(options.source, options.json)


def _generate(options: Any) -> None:
    from hybridflow.commands.talk import Speaker, generate
    from hybridflow.data.text import Template

    template = Template(options.template)
    speaker = Speaker.load(options.model, options.max_new_tokens, options.temperature, options.seed)
    generate(speaker, options.prompts, template, options.count, options.json)


def _chat(options: Any) -> None:
    from hybridflow.commands.talk import Speaker, chat

    chat(Speaker.load(options.model, options.max_new_tokens, options.temperature, options.seed), options.system)


def _serve_rewards(options: Any) -> None:
    from hybridflow.commands.serve import serve_rewards

    limits = (options.timeout_s, options.workers)
    serve_rewards(options.functions, (options.host, options.port), limits, options.secret)


def _serve(options: Any) -> None:
    from hybridflow.commands.serve_policy import serve_policy

    limits = (options.budget_ms, options.max_batch, options.max_connections)
    serve_policy(options.policy, (options.host, options.port), limits, options.follow)


def _bench(options: Any) -> None:
    from hybridflow.commands.bench import Workload, bench_rollout

    workload = Workload(options.prompts, options.group, options.prompt_tokens, options.new_tokens)
    bench_rollout(options.model, workload, options.dtype, options.precision, options.threads, options.json)


def _bench_policy(options: Any) -> int:
    from hybridflow.commands.bench_policy import bench_policy

    if options.steps < 1000:
        raise UserError(f"bench-policy: --steps {options.steps}: expected at least 1000, of which p99.9 leaves one out")
    return bench_policy(options.source, options.budget_ms, options.steps, options.json)


def _show(options: Any) -> int | None:
    from hybridflow.commands import show

    shown = {"algorithms": show.algorithms, "tasks": show.task_list, "keys": show.run_keys, "doctor": show.doctor}
    return shown[options.name](options.json)


def _auction(options: Any) -> None:
    from hybridflow.commands.auction import explain

    explain(options.source, options.json)


def _graph(options: Any) -> None:
    from hybridflow.commands.graph import graph

    graph(options.config, options.overrides, options.form, options.html)


def _reshard(options: Any) -> None:
    from hybridflow.commands.reshard import Request, reshard

    layout = (options.train, options.generate, options.strategy)
    reshard(Request(*layout, options.model, options.dtype, options.generation_dtype), options.json)


def _plan(options: Any) -> None:
    from hybridflow.commands.plan import explain_memory

    given = {name: getattr(options, name) for name in MAPPING if getattr(options, name) is not None}
    if options.cluster is not None and not options.calibrate:
        return _plan_mapping(options, given)
    if given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"plan: {named} says something about a device mapping; give --cluster too, like a100-80g:1x8")
    if options.compare:
        return _plan_compare(options)
    if options.calibrate:
        raise UserError("plan: --calibrate fits constants to a run; give a run directory and --compare too")
    explain_memory(options.source, options.overrides, options.json)


def _plan_compare(options: Any) -> None:
    from hybridflow.commands.compare import compare

    if options.overrides:
        raise UserError(
            f"plan: --compare reads what a run did; {' '.join(options.overrides)} can't change it: leave that out"
        )
    compare(options.source, options.calibrate, options.json)


def _plan_mapping(options: Any, given: dict[str, Any]) -> None:
    from hybridflow.commands.mapping import Files, Request, plan_mapping
    from hybridflow.commands.what_if import what_if
    from hybridflow.planner.cluster import parse_cluster
    from hybridflow.telemetry.rundir import RunDirectory

    wished = {name: given[name] for name in ("model", "lengths", "schedule", "objective") if name in given}
    source = RunDirectory.open(options.source).config if options.source.is_dir() else options.source
    request = Request(source, tuple(options.overrides), parse_cluster(options.cluster), **wished)
    files = {name: given[name] for name in FILES if name in given}
    if "write" in files and options.model is not None:
        raise UserError("plan: --write puts a mapping into a file that names its own models; leave out --model")
    if options.what_if is None:
        return plan_mapping(request, Files(**files), options.json)
    if files:
        raise UserError(
            f"plan: --what-if prints a table of many mappings; --{', --'.join(files)} are for one: leave them out"
        )
    what_if(request, options.what_if, options.json)


def _probe(options: Any) -> None:
    from hybridflow.commands.probe import probe

    probe(options.json)


def _profile(options: Any) -> None:
    from hybridflow.commands.profile import profile, show

    if options.source != "show":
        return profile(Path(options.source), options.overrides, options.json)
    if options.overrides:
        raise UserError(f"profile show: {' '.join(options.overrides)} says something about a run; give its TOML file")
    show(options.json)


def _models(options: Any) -> None:
    from hybridflow.commands import show
    from hybridflow.models import sources

    if options.action == "list":
        return show.models(options.json)
    if options.model is None:
        raise UserError(f"hybridflow models {options.action}: give the name of a model; hybridflow models lists them")
    if options.action == "add":
        return show.add_model(options.model)
    if options.action == "path":
        return print(sources.resolve(options.model))
    return show.model(options.model, options.json)


if __name__ == "__main__":
    sys.exit(main())
