"""`rollbook best`: the policy version that wins on gold, with its interval."""

from typing import Annotated, Any

import typer
from rich.markup import escape

from flows.printing import make_console, print_json, print_table
from flows.query import Format, FormatOption, LakeOption, RunArgument
from tasks.lake.location import LakeError, lake_at
from tasks.lake.runs import open_run
from tasks.sql.connection import connect, dicts
from tasks.sql.diagnose import has_judge

VERSIONS = (
    "SELECT f.policy_version, f.iteration, f.prompts, f.judged, c.prompts AS compared, f.gold, "
    "f.gold - 1.96 * f.gold_error AS gold_low, "
    "f.gold + 1.96 * f.gold_error AS gold_high, f.reward, f.kl, f.perplexity, c.win_rate, c.win_rate_low, "
    "c.win_rate_high, c.length_controlled_win_rate FROM frontier AS f LEFT JOIN comparisons AS c "
    "ON c.run_id = f.run_id AND c.policy_version = f.policy_version AND c.against = 'reference' "
    "AND c.held_out IS NULL AND c.measure = $measure WHERE f.run_id = $run_id ORDER BY f.policy_version"
)

AGAINST_HIGHEST_REWARD = (
    "SELECT avg(a.gold - b.gold) AS difference, stddev_samp(a.gold - b.gold) / sqrt(count(*)) AS error "
    "FROM verdicts AS a JOIN verdicts AS b USING (run_id, held_out, prompt_id) "
    "WHERE run_id = $run_id AND a.policy_version = $best AND b.policy_version = $highest"
)


def best(
    run: RunArgument = None,
    lake: LakeOption = None,
    by_reward: Annotated[
        bool,
        typer.Option("--by-reward", help="Believe the trained reward on held-out prompts; for runs without a judge."),
    ] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Name the policy version that wins on gold: not the one with the highest reward, which may have been hacked."""
    found = open_run(lake_at(lake), run)
    measure = "reward" if by_reward else "gold"
    with connect(found.lake, found.run_id) as connection:
        versions = dicts(connection.execute(VERSIONS, {"run_id": found.run_id, "measure": measure}))
        scored = [row for row in versions if row[measure] is not None]
        if not scored:
            judged = has_judge(connection, found.run_id)
            raise LakeError(_nothing_to_judge(found.run_id, bool(versions), judged))
        chosen = max(scored, key=lambda row: row[measure])
        rewarded = max(
            (row for row in versions if row["reward"] is not None), key=lambda row: row["reward"], default=None
        )
        lead = None
        if rewarded is not None and not by_reward and rewarded["policy_version"] != chosen["policy_version"]:
            pair = {"best": chosen["policy_version"], "highest": rewarded["policy_version"]}
            (lead,) = dicts(connection.execute(AGAINST_HIGHEST_REWARD, {"run_id": found.run_id, **pair}))
    if format is Format.JSON:
        print_json(
            {
                "run_id": found.run_id,
                "policy_version": chosen["policy_version"],
                "measure": measure,
                "best": chosen,
                "highest_reward": rewarded,
                "lead_over_highest_reward": lead,
                "versions": versions,
            }
        )
        return
    console = make_console()
    shown = ("policy_version", "iteration", "gold", "gold_low", "gold_high", "reward", "kl", "win_rate", "perplexity")
    heads = {name: name.replace("policy_version", "version").replace("_", " ") for name in shown}
    print_table(console, None, heads, [{name: row[name] for name in shown} for row in versions])
    console.print(
        f"run {escape(found.run_id)}: version [bold]{chosen['policy_version']}[/] has the best {measure}, "
        f"{_interval(measure, chosen)}; {_against_reference(chosen)}",
        highlight=False,
    )
    partly = [row for row in versions if row["judged"] < row["prompts"]]
    if partly and not by_reward:
        worst = min(partly, key=lambda row: row["judged"])
        console.print(
            f"[yellow]warning:[/] a judge failed on some prompts; of version {worst['policy_version']} it judged "
            f"{worst['judged']} of {worst['prompts']}, so that these means are not over the same prompts. "
            f"`rollbook audit` counts the failures",
            highlight=False,
        )
    if lead is not None and rewarded is not None:
        console.print(
            f"version {rewarded['policy_version']} has the highest reward, and {lead['difference']:.3g} ± "
            f"{1.96 * lead['error']:.2g} less gold on the same prompts",
            highlight=False,
        )


def _against_reference(row: dict[str, Any]) -> str:
    if row["win_rate"] is None:
        return "no answer of the reference has a score to compare with"
    return (
        f"it wins {row['win_rate']:.0%} [{row['win_rate_low']:.0%}, {row['win_rate_high']:.0%}] of {row['compared']} "
        f"prompts against the reference, {row['length_controlled_win_rate']:.0%} at equal length"
    )


def _interval(measure: str, row: dict[str, Any]) -> str:
    return f"{row[measure]:.3g}" + (f" [{row['gold_low']:.3g}, {row['gold_high']:.3g}]" if measure == "gold" else "")


def _nothing_to_judge(run_id: str, evaluated: bool, judged: bool) -> str:
    if not evaluated:
        return (
            f"run {run_id} has no evaluation yet; it takes evaluate.source, and an iteration that evaluate.every names"
        )
    if judged:
        return (
            f"run {run_id} has a gold judge, which failed on every held-out answer; `rollbook audit` counts the "
            f"failures. Mend it, or believe the trained reward with --by-reward"
        )
    return (
        f"run {run_id} has no gold judge; add one that nobody trains on under [[evaluate.judges]], or believe the "
        f"trained reward with --by-reward"
    )
