"""`rollbook trace`: the story of one sample, from its prompt to the updates that used it."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.printing import make_console, print_json, print_table
from flows.query import Format, FormatOption, LakeOption
from tasks.lake.location import LakeError, lake_at
from tasks.lake.runs import Run, open_run
from tasks.sql.connection import connect, dicts

Rows = list[dict[str, Any]]

PART_QUERIES = {
    "sample": "SELECT r.*, e.* EXCLUDE (run_id, iteration, sample_id, policy_version, response_len, action_mask), "
    "f.bootstrap_value FROM rollouts AS r LEFT JOIN experience AS e USING (run_id, iteration, sample_id) "
    "LEFT JOIN forwards AS f USING (run_id, iteration, sample_id) WHERE r.sample_id = $1",
    "prompt": "SELECT p.* FROM prompts AS p JOIN rollouts AS r USING (run_id, iteration, prompt_id) "
    "WHERE r.sample_id = $1",
    "rewards": "FROM rewards WHERE sample_id = $1 ORDER BY source",
    "tokens": "FROM tokens WHERE sample_id = $1 AND position IS NOT NULL ORDER BY position",
    "updates": "FROM lineage WHERE sample_id = $1 ORDER BY iteration, step",
    "ratios": "SELECT step, ratio, clipped FROM token_updates WHERE sample_id = $1 ORDER BY iteration, step",
}
"""What is told of a sample, and the query for each part."""

MASKS = {"action": "A", "score": "S", "transition": "T", "value": "V", "bootstrap": "B", "continuation": "C"}

NUMBERS = {
    "behavior_logp": "engine",
    "old_logp": "old",
    "ref_logp": "ref",
    "sampled_kl": "KL",
    "shaped_reward": "reward",
    "old_value": "value",
    "advantage": "adv.",
    "returns": "return",
}
"""The columns of `tokens` that are shown, with their headings; the first three are log-probs."""

RATIOS_A_LINE = 9


def trace(
    sample: Annotated[str, typer.Argument(metavar="SAMPLE_ID", help="The sample, as in rollouts.sample_id.")],
    run: Annotated[str | None, typer.Option("--run", help="Its run; the latest if not given.")] = None,
    lake: LakeOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Tell the story of one sample: prompt, tokens, masks, rewards, advantages, and the updates that used it."""
    found = open_run(lake_at(lake), run)
    story = read_story(found, sample)
    if format is Format.JSON:
        print_json(story)
        return
    tell(make_console(), story, _token_texts(found, story))


def read_story(run: Run, sample: str) -> dict[str, Rows]:
    """The rows of each part of a sample's story, by part. Raises LakeError where the run has no such sample."""
    with connect(run.lake, run.run_id) as connection:
        story = {part: dicts(connection.execute(query, [sample])) for part, query in PART_QUERIES.items()}
    if not story["sample"]:
        raise LakeError(
            f"run {run.run_id} has no sample {sample}; "
            f'rollbook sql "SELECT sample_id FROM rollouts" --run {run.run_id} lists them'
        )
    return story


def _token_texts(run: Run, story: Mapping[str, Rows]) -> Sequence[str] | str:
    """The text of each token by itself, or why there is none."""
    from tokenizers import Tokenizer

    from tasks.models.samples import resolve

    (sample,) = story["sample"]
    try:
        path = resolve(run.config_at(sample["iteration"]).models.policy) / "tokenizer.json"
    except LakeError as error:
        return str(error)
    if not path.exists():
        return f"no {path}"
    tokenizer = Tokenizer.from_file(str(path))
    return [tokenizer.decode([token], skip_special_tokens=False) for token in sample["response_token_ids"]]


# The telling


def tell(console: Console, story: Mapping[str, Rows], texts: Sequence[str] | str) -> None:
    """Prints a story in order: where the sample comes from, what was said and scored, and what was made of it."""
    (sample,) = story["sample"]
    console.print(
        f"sample [bold]{escape(sample['sample_id'])}[/] of run {escape(sample['run_id'])}, iteration "
        f"{sample['iteration']}: answer {sample['group_index']} to prompt {escape(sample['prompt_id'])}, sampled by "
        f"policy version {sample['policy_version']} with seed {sample['seed']}",
        highlight=False,
    )
    for prompt in story["prompt"]:
        console.print(
            f"\n[bold]prompt[/] ({prompt['prompt_len']} tokens, epoch {prompt['epoch']} of {escape(prompt['source'])})"
        )
        console.print(_printable(_said(prompt)), markup=False, highlight=False)
    console.print(f"\n[bold]response[/] ({sample['response_len']} tokens, {_ending(sample)})")
    console.print(_printable(sample["text"]), markup=False, highlight=False)
    _tell_rewards(console, sample, story["rewards"])
    _tell_tokens(console, story["tokens"], texts)
    _tell_updates(console, sample, story["updates"])
    if story["ratios"]:
        _tell_ratios(console, story["ratios"])


def _said(prompt: Mapping[str, Any]) -> str:
    if not prompt["chat"]:
        return str(prompt["text"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in json.loads(prompt["text"]))


def _printable(text: str) -> str:
    """Control characters spelled out: a policy may sample any."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _ending(sample: Mapping[str, Any]) -> str:
    reason = {
        "stop": "it stopped by itself",
        "length": f"cut at the limit of {sample['max_tokens']} tokens",
        "context": f"cut where the context ended, after {sample['max_tokens']} tokens",
        "abort": "cut from outside",
    }[sample["finish_reason"]]
    if sample["terminated"] or sample["bootstrap_value"] is None:
        return f"{reason}: {'the episode ended' if sample['terminated'] else 'truncated'}"
    return f"{reason}: truncated, the value {sample['bootstrap_value']:.4g} after it is bootstrapped"


def _tell_rewards(console: Console, sample: Mapping[str, Any], rewards: Rows) -> None:
    if not rewards:
        console.print("\nnot scored yet")
        return
    columns = ["source", "kind", "raw", "value", "weight", "status", "detail"]
    shown = [{**row, "detail": row["detail"] or ""} for row in rows_of(rewards, columns)]
    console.print()
    print_table(console, None, {name: "reward source" if name == "source" else name for name in columns}, shown)
    if sample["kl_coef_used"] is None:
        return
    if sample["dropped"]:
        console.print(f"[bold]dropped[/] from training: {sample['dropped']}")
    outcome = "no outcome" if sample["outcome"] is None else f"outcome {sample['outcome']:.4g}"
    at = "" if sample["score_index"] is None else f" added at token {sample['score_index']}"
    console.print(
        f"{outcome}{at}; KL penalty {sample['kl_coef_used']:.4g} x {sample['kl_sum']:.4g} nats; summed reward "
        f"{sample['reward_sum']:.4g}; weight in the loss {sample['importance_weight']:.4g}",
        highlight=False,
    )


def rows_of(rows: Rows, columns: Sequence[str]) -> Rows:
    return [{name: row[name] for name in columns} for row in rows]


def _tell_tokens(console: Console, tokens: Rows, texts: Sequence[str] | str) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title="tokens", title_justify="left")
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("token", no_wrap=True, overflow="ellipsis", max_width=12)
    table.add_column("id", justify="right", no_wrap=True)
    table.add_column("masks", no_wrap=True)
    for heading in NUMBERS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for row in tokens:
        text = "" if isinstance(texts, str) else repr(texts[row["position"]])[1:-1]
        masks = "".join(letter if row[f"{name}_mask"] else "." for name, letter in MASKS.items())
        numbers = (_number(row[name]) for name in NUMBERS)
        table.add_row(str(row["position"]), escape(text), str(row["token_id"]), masks, *numbers)
    console.print(table)
    if isinstance(texts, str):
        console.print(f"tokens are shown by their ids: {escape(texts)}")
    letters = ", ".join(f"{letter} {name}" for name, letter in MASKS.items())
    console.print(f"masks: {letters}; engine, learner and ref are log-probs in nats", style="dim", highlight=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 1000 else f"{value:.2e}"


def _tell_updates(console: Console, sample: Mapping[str, Any], updates: Rows) -> None:
    console.print()
    if not updates:
        console.print("no update used it" + (f": it was dropped ({sample['dropped']})" if sample["dropped"] else ""))
        return
    headings = {
        "iteration": "iter",
        **{name: name for name in ("step", "epoch", "minibatch", "place")},
        "made_version": "makes version",
        "applied": "applied",
        "ratio_mean": "ratio mean",
        "ratio_min": "min",
        "ratio_max": "max",
        "clip_fraction": "clipped",
    }
    print_table(console, "updates that used it", headings, updates)
    if updates[0]["ratio_mean"] is None:
        console.print("its ratios were not recorded: train.record_tokens was off", style="dim")


def _tell_ratios(console: Console, ratios: Rows) -> None:
    """A line a token and a column a step; in several tables where there are many steps."""
    console.print("ratio of each token before the step; * where the clipped branch was chosen", style="italic")
    for start in range(0, len(ratios), RATIOS_A_LINE):
        steps = ratios[start : start + RATIOS_A_LINE]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("#", justify="right")
        for step in steps:
            table.add_column(f"step {step['step']}", justify="right", no_wrap=True)
        for position in range(len(steps[0]["ratio"])):
            cells = (f"{s['ratio'][position]:.4f}{'*' if s['clipped'][position] else ' '}" for s in steps)
            table.add_row(str(position), *cells)
        console.print(table)
