"""Injection of the context into functions of all kinds."""

import functools
import typing
from typing import Annotated, Any, Optional, Union

import pytest

from genlight.adapter import JobContext, bind_job_context
from support import postponed_annotations as postponed
from support.messages import refusal

CONTEXT = JobContext(job_id="1")


def call(function, *args, **kwargs):
    """Call `function` as the runner does."""
    args, kwargs = bind_job_context(function, args, kwargs, CONTEXT)
    return function(*args, **kwargs)


def by_name(job):
    return job


def by_annotation(place: JobContext):
    return place


def optional(place: Optional[JobContext] = None):  # noqa: UP045
    return place


def union(place: Union[int, JobContext] = 0):  # noqa: UP007
    return place


def new_union(place: JobContext | None = None):
    return place


def in_text(place: "JobContext"):
    return place


def part_in_text(place: Optional["JobContext"] = None):
    return place


def annotated(place: Annotated[JobContext, "where"]):
    return place


def keyword_only(*, job):
    return job


def positional_only(job, /):
    return job


def with_default(job=None):
    return job


def in_a_wrapper(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Task:
    def method(self, job):
        return job

    @classmethod
    def of_class(cls, job):
        return job

    @staticmethod
    def static(job):
        return job

    def __call__(self, job: JobContext):
        return job


class Made:
    def __init__(self, job):
        self.job = job


REQUESTS = {
    "by_name": by_name,
    "by_annotation": by_annotation,
    "optional": optional,
    "union": union,
    "new_union": new_union,
    "in_text": in_text,
    "part_in_text": part_in_text,
    "annotated": annotated,
    "keyword_only": keyword_only,
    "positional_only": positional_only,
    "with_default": with_default,
    "lambda": lambda job: job,
    "method": Task().method,
    "class_method": Task.of_class,
    "static_method": Task.static,
    "callable": Task(),
    "decorated": in_a_wrapper(by_annotation),
    "decorated_twice": in_a_wrapper(in_a_wrapper(keyword_only)),
    "decorated_positional_only": in_a_wrapper(positional_only),
    "decorated_method": functools.partial(in_a_wrapper(Task.method), Task()),
    "partial": functools.partial(by_name),
    "partial_of_decorated": functools.partial(in_a_wrapper(by_name)),
    "cached": functools.lru_cache(by_name),
    "future_annotations": postponed.asks,
    "future_union": postponed.asks_perhaps,
    "only_for_type_checkers": postponed.asks_by_a_name_that_is_never_imported,
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_parameter_for_the_context_receives_it(name):
    assert call(REQUESTS[name]) is CONTEXT


def test_a_class_receives_it_too():
    assert call(Made).job is CONTEXT


def other_name(place):
    return place


def other_annotation(job: str = "mine"):
    return job


def any_annotation(job: Any = "mine"):
    return job


def in_a_list(place: list[JobContext] = ()):
    return place or "mine"


def the_class(place: type[JobContext] = JobContext):
    return "mine" if place is JobContext else place


def variadic(*job, **jobs):
    return "mine" if (job, jobs) == ((), {}) else (job, jobs)


@pytest.mark.parametrize(
    "function",
    [
        in_a_list,
        the_class,
        variadic,
        lambda: "mine",
    ],
)
def test_a_function_without_such_a_parameter_is_called_unchanged(function):
    assert call(function) == "mine"


@pytest.mark.parametrize("function", [other_annotation, any_annotation, postponed.names_what_is_not_there])
def test_a_parameter_named_job_receives_it_whatever_its_annotation(function):
    assert call(function) is CONTEXT


def test_a_call_that_cannot_be_bound_is_left_to_python():
    assert bind_job_context(by_name, (1, 2, 3), {}, CONTEXT) == ((1, 2, 3), {})
    assert bind_job_context(max, (1, 2), {}, CONTEXT) == ((1, 2), {})
    assert bind_job_context(other_name, (), {}, CONTEXT) == ((), {})


def test_arguments_of_the_caller_are_kept():
    assert call(by_name, "mine") == "mine"
    assert call(by_name, job="mine") == "mine"
    assert call(with_default, None) is None
    assert call(functools.partial(by_name, job="mine")) == "mine"
    assert call(functools.partial(by_name, "mine")) == "mine"
    assert call(functools.partial(in_a_wrapper(functools.partial(by_name, job="mine")))) == "mine"


def three(a, job, b):
    return a, job, b


def two_positional_only(a, job, /, b=0):
    return a, job, b


def test_the_context_is_inserted_between_other_arguments():
    assert call(three, 1, b=2) == (1, CONTEXT, 2)
    assert call(three, a=1, b=2) == (1, CONTEXT, 2)
    assert call(two_positional_only, 1, b=2) == (1, CONTEXT, 2)
    assert call(functools.partial(three, b=2), 1) == (1, CONTEXT, 2)
    assert call(functools.partial(three, 1, b=2)) == (1, CONTEXT, 2)
    assert call(functools.partial(three, a=1), b=2) == (1, CONTEXT, 2)


def test_other_arguments_are_passed_on_unchanged():
    args, kwargs = bind_job_context(three, (1,), {"b": 2}, CONTEXT)
    assert (args, kwargs) == ((1, CONTEXT), {"b": 2})
    args, kwargs = bind_job_context(three, (), {"b": 2, "a": 1}, CONTEXT)
    assert (args, kwargs) == ((), {"a": 1, "b": 2, "job": CONTEXT})


def three_contexts(job, place: JobContext, *, third: JobContext | None = None):
    return job, place, third


def test_each_parameter_for_the_context_receives_it_unless_the_caller_passes_it():
    assert call(three_contexts) == (CONTEXT, CONTEXT, CONTEXT)
    assert call(three_contexts, "mine") == ("mine", CONTEXT, CONTEXT)
    assert call(three_contexts, place="mine") == (CONTEXT, "mine", CONTEXT)


def test_a_call_that_python_refuses_fails_with_its_message():
    with refusal(TypeError):
        call(three, b=2)
    assert typing.get_type_hints(by_annotation) == {"place": JobContext}
