"""Exceptions carry their facts, show them, and survive a trip to another process."""

import inspect
import pickle
from pathlib import Path

import pytest

from genlight.adapter.contract import exceptions

EXAMPLES = [
    exceptions.StartupContractError("startup.invalid_job_spec", "max_steps is missing"),
    exceptions.UsageError("there is no run in runs/x"),
    exceptions.ContractError("lacks setup"),
    exceptions.TrainerPathError("module holds no trainer"),
    exceptions.InputError("no such file"),
    exceptions.AuthError("refused"),
    exceptions.CheckpointError("disk full"),
    exceptions.BrokenCheckpointError("step-00000200", "size differs"),
    exceptions.UnloadableCheckpointError("step-00000200", "the type package.State is not imported"),
    exceptions.UnstorableStateError('state["cache"][3]', "builtins.generator", "leave it out"),
    exceptions.UnwrittenCheckpointError("step-00000200", "c", 10**6, 28, "No space left on device", "c/.tmp/a.json"),
    exceptions.HookOrderError("a waits for b"),
    exceptions.MonitorError("nothing reports eval/score"),
    exceptions.EventLogError("locked"),
    exceptions.ReplayWriterError("another thread writes"),
    exceptions.ThreadLimitError("no thread could be started"),
    exceptions.EvaluationError("the command printed no JSON"),
    exceptions.UploadError("checkpoint not delivered", auth=True),
    exceptions.ReplicaDriftError("one tensor differs"),
    exceptions.ResumeDifferenceError("step 21 is not the same"),
    exceptions.NonfiniteError("the loss is nan at step 3"),
    exceptions.RecoveryError("training could not be recovered after 5 attempts"),
    exceptions.RankFailedError("rank 1 was killed by signal 9"),
    exceptions.TrainingHungError(1, 300.0, Path("hangs/rank-1-1.txt")),
    exceptions.TrainingCanceled("preempted"),
]


def classes():
    return [cls for _, cls in inspect.getmembers(exceptions, inspect.isclass) if issubclass(cls, Exception)]


def test_every_exception_of_the_module_is_a_genlight_error_and_has_an_example_here():
    assert {type(example) for example in EXAMPLES} | {exceptions.GenlightError} == set(classes())
    assert all(issubclass(cls, exceptions.GenlightError) for cls in classes())


def test_the_tree_in_the_docstring_names_every_exception():
    assert all(cls.__name__ in exceptions.__doc__ for cls in classes())


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_exception_keeps_text_and_facts_when_it_is_pickled(error):
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize(
    ("error", "caught_as"),
    [
        (exceptions.ContractError("x"), TypeError),
        (exceptions.UnstorableStateError("a", "b"), TypeError),
        (exceptions.UnstorableStateError("a", "b"), exceptions.CheckpointError),
        (exceptions.BrokenCheckpointError("a", "b"), exceptions.CheckpointError),
        (exceptions.UnwrittenCheckpointError("a", "c", 1, 5, "b", None), OSError),
        (exceptions.UnwrittenCheckpointError("a", "c", 1, 5, "b", None), exceptions.CheckpointError),
        (exceptions.HookOrderError("x"), ValueError),
        (exceptions.AuthError("x"), exceptions.InputError),
    ],
)
def test_an_exception_is_caught_as_its_python_counterpart(error, caught_as):
    with pytest.raises(caught_as):
        raise error


def test_an_unwritten_checkpoint_names_the_way_out():
    error = exceptions.UnwrittenCheckpointError("final", "/c", 2_500_000, 28, "it went wrong", None)

    assert str(error).startswith("checkpoint final (2.5 MB) could not be written to /c: it went wrong; free some space")
    assert (error.errno, error.strerror, error.filename) == (28, "it went wrong", None)
