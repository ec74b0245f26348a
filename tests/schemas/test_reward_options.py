"""Options of a reward source: each kind knows its own, and what contradicts itself is refused as it is read."""

from typing import Any

import pytest

from schemas.config import Config, ConfigError, override, parse
from schemas.reward_options import EnsembleOptions


def config(**source: Any) -> Config:
    raw = {
        "run": {"id": "r-test"},
        "models": {"policy": "none"},
        "prompts": {"source": "none.jsonl", "per_iteration": 1},
        "rollout": {"max_new_tokens": 100},
        "rewards": [{"name": "r", **source}],
        "train": {"minibatch_size": 1},
    }
    return parse(raw, "the test")


FUNCTION = {"kind": "function", "function": "a:b"}
URL = "http://host:5000/score"
JUDGE = {"url": URL, "model": "m", "template": "{response}"}
ENSEMBLE = {"kind": "ensemble", "options": {"members": ["a", "b"]}}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({**FUNCTION, "options": {"members": ["a"]}}, "unknown option members; there are none"),
        ({"kind": "ensemble", "options": {"member": ["a", "b"]}}, "unknown option member; did you mean members"),
        ({"kind": "ensemble"}, "missing option members: folders of sequence classifiers"),
        ({"kind": "ensemble", "options": {"members": ["a"]}}, "options.members.*at least 2"),
        ({"kind": "ensemble", "options": ["a", "b"]}, "options must be a table"),
        ({**ENSEMBLE, "path": "a"}, "needs neither `path` nor `function`, but `options`"),
        ({"kind": "ensemble", "options": {"members": ["a", "b"], "std_coef": 1}}, 'combine = "mean_minus_std" needs'),
        ({"kind": "ensemble", "options": {"members": ["a", "b"], "combine": "mean_minus_std"}}, "needs std_coef"),
        ({"kind": "process_model"}, "needs `path` and no `function`"),
        ({"kind": "process_model", "path": "a", "options": {"separator": ""}}, "options.separator.*at least 1"),
        ({"kind": "verifier"}, "options.check must be one of exact, number, regex, tests, reasoning_gym, not None"),
        ({"kind": "verifier", "options": {"check": "exact", "abs_tol": 1}}, "unknown option abs_tol; there are: check"),
        ({"kind": "verifier", "options": {"check": "exact", "extract": "("}}, r"options.extract: '\(' is no regular"),
        ({"kind": "verifier", "options": {"check": "tests"}, "timeout": 5}, "seconds = 5 must be below timeout = 5"),
        ({"kind": "verifier", "function": "a:b", "options": {"check": "exact"}}, "neither `path` nor `function`"),
        ({"kind": "http"}, "missing option url: where batches are posted"),
        ({"kind": "http", "options": {"url": "localhost:5000"}}, "options.url: must be an address"),
        ({"kind": "http", "options": {"url": "http://me:pw@host/"}}, "no user name and no password.*api_key_env"),
        ({"kind": "http", "options": {"url": URL, "labels": "a"}}, '"rollbook" sends all columns.*remove labels'),
        ({"kind": "http", "options": {"url": URL, "in_flight": 0}}, "options.in_flight.*greater than or equal to 1"),
        ({"kind": "judge", "options": JUDGE | {"template": "{prompt}"}}, r"template must hold \{response\}"),
        ({"kind": "judge", "options": JUDGE | {"pattern": "score"}}, "pattern must have a group"),
        ({"kind": "judge", "options": JUDGE | {"extra": {"temperature": 1}}}, "extra can't set temperature"),
        ({"kind": "ensembles", "options": {"members": ["a", "b"]}}, "kind.*'ensemble'"),
        ({**ENSEMBLE, "timeout": 3}, r"rewards\.0\.timeout: nothing reads it.*\"ensemble\" is timed"),
        ({**FUNCTION, "on_failure": "fail", "max_failed": 0.1}, "nothing reads max_failed"),
        ({**FUNCTION, "max_failed": 1.5}, "max_failed.*less than or equal to 1"),
        *(
            ({**FUNCTION, "on_failure": wrong}, r'must be "fail", "drop" or \{ substitute = number \}')
            for wrong in ("zero", 0, None, {}, {"substitute": True}, {"substitute": float("nan")}, {"value": 1})
        ),
    ],
)
def test_what_a_kind_has_no_use_for_is_refused(source, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        config(**source)


@pytest.mark.parametrize(
    ("source", "substitute"),
    [
        (FUNCTION, None),
        ({**FUNCTION, "on_failure": "fail"}, None),
        ({**FUNCTION, "on_failure": {"substitute": -1}, "max_failed": 0.1}, -1.0),
        (ENSEMBLE, None),
        ({"kind": "http", "options": {"url": URL}, "timeout": 3}, None),
        ({"kind": "judge", "options": JUDGE | {"extra": {"chat_template_kwargs": {"enable_thinking": False}}}}, None),
        ({"kind": "verifier", "options": {"check": "number", "rel_tol": 0.01}}, None),
    ],
)
def test_options_are_read_again_as_they_were_given(source, substitute):
    given = config(**source)
    assert given.rewards[0].substitute == substitute
    assert Config.model_validate_json(given.model_dump_json()) == given
    assert override(given, ["run.seed=0"]) == given


def test_defaults_are_filled_in_and_one_option_can_be_set():
    given = override(config(**ENSEMBLE), ["rewards.0.options.combine=min"])
    assert given.rewards[0].options == EnsembleOptions(members=("a", "b"), combine="min")
    dumped = given.model_dump(mode="json")["rewards"][0]["options"]
    assert dumped == {"members": ["a", "b"], "combine": "min", "std_coef": None}
    assert given.rewards[0].folders == {"r.0": "a", "r.1": "b"}
