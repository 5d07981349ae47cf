"""The curve of a run: few points, means over the rows between them, the same after an interruption."""

import json

import pytest

from paceline.adapt.recipes.learning_curve import (
    COLUMNS,
    CURVE_FILE,
    MAX_POINTS,
    VALIDATION_COLUMNS,
    LearningCurve,
    read_curve,
    read_validation,
)
from paceline.errors import ConfigError


def run(curve, steps, first=1):
    """Step s learns s rows with loss s and nll 1 / s, in a tenth of a second."""
    for s in range(first, steps + 1):
        curve.add(step=s, rows=s * (s + 1) // 2, seconds=s / 10, loss=float(s), nll=1 / s)
    return curve


def test_a_short_run_has_a_point_for_every_step(tmp_path):
    run(LearningCurve(5), 5).write(tmp_path)
    curve = read_curve(tmp_path)
    assert curve["step"] == [1, 2, 3, 4, 5] and curve["rows"] == [1, 3, 6, 10, 15]
    assert curve["loss"] == [1, 2, 3, 4, 5] and curve["seconds"] == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_a_point_is_the_mean_over_the_rows_of_its_interval_and_the_last_one_may_be_short(tmp_path):
    run(LearningCurve(3 * MAX_POINTS - 2), 7).write(tmp_path)
    curve = read_curve(tmp_path)
    assert curve["step"] == [3, 6, 7]
    assert curve["loss"] == pytest.approx([(1 + 4 + 9) / 6, (16 + 25 + 36) / 15, 7], rel=1e-3)
    assert curve["nll"] == pytest.approx([3 / 6, 3 / 15, 1 / 7], rel=1e-3)


@pytest.mark.parametrize("num_steps", [MAX_POINTS, MAX_POINTS + 1, 12_345])
def test_a_long_run_stays_small_and_its_numbers_are_of_four_digits(tmp_path, num_steps):
    run(LearningCurve(num_steps), num_steps).write(tmp_path)
    values = json.loads((tmp_path / CURVE_FILE).read_text())
    assert (tmp_path / CURVE_FILE).stat().st_size < 20_000
    assert list(values) == ["format", "unit", *COLUMNS] and values["format"] == 1
    assert {len(values[n]) for n in COLUMNS} == {len(values["step"])} and 100 <= len(values["step"]) <= MAX_POINTS
    assert values["step"][-1] == num_steps and values["rows"][-1] == num_steps * (num_steps + 1) // 2
    assert all(v == float(f"{v:.4g}") for n in ("seconds", "loss", "nll") for v in values[n])


def test_validations_stand_where_the_run_stood_also_after_an_interruption(tmp_path):
    curve = run(LearningCurve(5), 2)
    curve.validate(nll=2.0, acceptance_length=1.23456)
    resumed = LearningCurve(5)
    resumed.resume(curve.state())
    run(resumed, 4, first=3).validate(nll=1.5, acceptance_length=2.0)
    resumed.write(tmp_path)
    expected = {
        "step": [2, 4],
        "rows": [3, 10],
        "seconds": [0.2, 0.4],
        "nll": [2, 1.5],
        "acceptance_length": [1.235, 2],
    }
    assert read_validation(tmp_path) == expected and read_curve(tmp_path)["step"] == [1, 2, 3, 4]
    run(LearningCurve(5), 2).write(tmp_path)
    assert read_validation(tmp_path) == {name: [] for name in VALIDATION_COLUMNS}


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_resumed_curve_is_the_uninterrupted_one(tmp_path, stop):
    num_steps = 3 * MAX_POINTS
    whole = run(LearningCurve(num_steps), 10)
    state = run(LearningCurve(num_steps), stop).state()
    resumed = LearningCurve(num_steps)
    resumed.resume(state)
    assert run(resumed, 10, first=stop + 1).state() == whole.state()


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": 2}', '{"format": 1}', None, "uneven", "empty", "validation"],
    ids=lambda t: str(t)[:12],
)
def test_what_is_no_curve_is_refused_with_its_path(tmp_path, text):
    lists = {"uneven": [[1], [1], [1], [1], []], "empty": [[]] * 5}.get(text)
    if text == "validation":
        text = json.dumps({"format": 1, **{name: [1] for name in COLUMNS}, "validation": {"step": [1]}})
    if lists is not None:
        text = json.dumps({"format": 1, **dict(zip(COLUMNS, lists, strict=True))})
    if text is not None:
        (tmp_path / CURVE_FILE).write_text(text)
    with pytest.raises(ConfigError, match=CURVE_FILE):
        read_curve(tmp_path)


def test_a_curve_of_another_format_is_refused_with_both_numbers(tmp_path):
    (tmp_path / CURVE_FILE).write_text('{"format": 2}')
    with pytest.raises(ConfigError, match=rf"^format of \S+{CURVE_FILE} must be 1, got 2$"):
        read_curve(tmp_path)
