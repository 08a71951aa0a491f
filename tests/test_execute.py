"""How the parent follows a trial: its limits, and how it tells one ending from another."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from harness import execute


def follow(script: list[tuple[float, dict[str, object]]], timeout_s: float) -> tuple[object, ...]:
    """Follow a worker that waits and then sends an event, again and again, and then ends."""
    events, writer = os.pipe()

    def work() -> None:
        for wait, event in script:
            time.sleep(wait)
            if event:
                os.write(writer, json.dumps(event).encode() + b"\n")
        os.close(writer)

    threading.Thread(target=work, daemon=True).start()
    return execute._follow(events, timeout_s, lambda heading: None)


def test_a_trial_that_ends_in_time() -> None:
    assert follow([(0, {"stage": "Data"}), (0, {"tags": []})], 5) == ("Data", None, None)


def test_a_trial_that_exceeds_its_limit() -> None:
    assert follow([(0, {"stage": "Data"}), (2, {})], 0.5) == ("Data", None, 0.5)


def test_the_first_step_does_not_count_towards_the_limit() -> None:
    script: list[tuple[float, dict[str, object]]] = [
        (0, {"tags": ["first-step"]}),
        (1, {"stage": "Timed run"}),
        (0.1, {}),
    ]
    assert follow(script, 0.5) == ("Timed run", None, None)


def test_the_first_step_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "FIRST_STEP_TIMEOUT_S", 0.5)
    assert follow([(0, {"stage": "Training step"}), (0, {"tags": ["first-step"]}), (2, {})], 60) == (
        "Training step", None, 0.5,
    )  # fmt: skip


def ending(
    last: dict[str, object] | None, code: int = 0, log: list[str] | None = None, oom: bool = False
) -> tuple[object, ...]:
    return execute._ending("Timed run", last, code, log or [], oom)


@pytest.mark.parametrize(
    ("last", "options", "status", "error"),
    [
        (None, {}, "ok", None),
        ({"raised": "NotIdentical", "message": "gradient"}, {}, "not_identical", "gradient"),
        ({"raised": "Unsupported", "message": "no GPU"}, {}, "unsupported", "no GPU"),
        ({"raised": "ValueError", "message": ""}, {}, "failed", "Timed run: ValueError"),
        ({"raised": "_ArrayMemoryError", "message": "x"}, {}, "out_of_memory", "Timed run: _ArrayMemoryError: x"),
        ({"raised": "OutOfMemoryError", "message": "CUDA"}, {}, "out_of_memory", "Timed run: OutOfMemoryError: CUDA"),
        ({"kernel_exit": -9}, {}, "crashed", "Timed run: kernel ended by SIGKILL"),
        (
            {"kernel_exit": -9}, {"oom": True}, "out_of_memory",
            "Timed run: kernel ended by SIGKILL: the system ran out of memory",
        ),
        (
            {"kernel_exit": -6}, {"log": ["what(): std::bad_alloc"]}, "out_of_memory",
            "Timed run: kernel ended by SIGABRT: what(): std::bad_alloc",
        ),
        ({"kernel_exit": -11}, {"oom": True}, "crashed", "Timed run: kernel ended by SIGSEGV"),
        (None, {"code": -signal.SIGKILL}, "crashed", "Timed run: worker ended by SIGKILL"),
        (None, {"code": 1, "log": ["boom"]}, "crashed", "Timed run: worker exited with status 1: boom"),
    ],
)  # fmt: skip
def test_endings_are_told_apart(
    last: dict[str, object] | None, options: dict[str, object], status: str, error: str | None
) -> None:
    assert ending(last, **options) == (status, error)  # type: ignore[arg-type]


def test_an_error_is_one_line_of_bounded_length() -> None:
    _, error = ending({"raised": "E", "message": "\x1b[31mred\x1b[0m\n" + "x" * 5000})
    assert isinstance(error, str)
    assert "\n" not in error
    assert "\x1b" not in error
    assert len(error) < 350
