"""Loaders and the executor return the right batches and run closures at the right steps."""

import warnings
from collections import UserDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headwater.utils.data.executor as executor_module
from headwater.api.step import checkpoint_closure, step_closure, trace
from headwater.core.errors import ConfigError, DataError
from headwater.distributed import is_streamer
from headwater.utils import CSConfig
from headwater.utils.data import DataExecutor, DataLoader
from headwater.utils.data.loader import passes, with_last


def numbers(count):
    return [torch.full((2,), float(number)) for number in range(count)]


def firsts(batches):
    return [int(batch[0]) for batch in batches]


def test_the_input_function_is_called_once_and_its_result_iterated_again():
    calls = []

    def input_fn(count, *, start):
        calls.append((count, start, is_streamer()))
        return [torch.tensor([float(start + number)]) for number in range(count)]

    loader = DataLoader(input_fn, 3, start=5)
    assert calls == []
    assert firsts(loader) == firsts(loader) == [5, 6, 7] and len(loader) == 3
    assert calls == [(3, 5, True)] and not is_streamer()


def test_an_input_function_that_is_a_generator_is_called_for_each_pass():
    reading = []

    def input_fn():
        for batch in numbers(2):
            reading.append(is_streamer())
            yield batch

    loader = DataLoader(input_fn)
    assert firsts(DataExecutor(loader, num_steps=5)) == [0, 1, 0, 1, 0]
    assert set(reading) == {True}
    with pytest.raises(TypeError):
        len(loader)


def test_a_torch_loader_returns_the_same_batches():
    data = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))

    def input_fn():
        return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

    torch.manual_seed(0)
    expected = [batch for _ in range(2) for batch in input_fn()]
    torch.manual_seed(0)
    executor = DataExecutor(DataLoader(input_fn), num_steps=6)
    assert len(executor) == 6
    for mine, torchs in zip(executor, expected, strict=True):
        assert all(map(torch.equal, mine, torchs))


def in_worker(_batch):
    return torch.tensor([is_streamer()])


def test_workers_of_a_torch_loader_are_streamers():
    loader = torch.utils.data.DataLoader(range(2), num_workers=1, collate_fn=in_worker)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process that has threads
        assert [bool(batch) for batch in loader] == [True, True]


@given(st.integers(1, 5), st.integers(1, 12) | st.none())
def test_passes_return_the_requested_number_of_batches(size, wanted):
    given = list(passes(range(size), wanted))
    assert given == [index % size for index in range(wanted or size)]


@given(st.integers(1, 6), st.booleans())
def test_the_last_batch_is_marked(size, known):
    marked = list(with_last(iter(range(size)), size if known else None))
    assert marked == [(index, index == size - 1) for index in range(size)]


def test_no_batch_is_read_ahead_if_the_length_is_known():
    taken = []

    class Loader:
        def __len__(self):
            return 3

        def __iter__(self):
            for batch in numbers(3):
                taken.append(batch)
                yield batch

    for index, _ in enumerate(DataExecutor(Loader()), 1):
        assert len(taken) == index


@pytest.mark.parametrize(
    ("steps", "checkpoint_steps", "size", "expected"),
    [
        (10, 4, 3, [4, 8, 10]),
        (8, 4, 99, [4, 8]),
        (5, None, 2, [5]),
        (5, 0, 2, [5]),
        (None, 2, 5, [2, 4, 5]),
        (None, None, 3, [3]),
    ],
)
@pytest.mark.parametrize("sized", [True, False])
def test_checkpoints_run_at_their_steps_and_at_the_last_step(steps, checkpoint_steps, size, expected, sized):
    saved = []
    save = checkpoint_closure(saved.append)
    loader = numbers(size) if sized else DataLoader(lambda: iter(numbers(size)))
    executor = DataExecutor(loader, num_steps=steps, checkpoint_steps=checkpoint_steps)
    for _ in executor:
        save(executor.step)
    assert saved == expected


def test_step_closures_run_at_activation_steps_and_at_the_last_step():
    seen = []
    note = step_closure(seen.append)
    executor = DataExecutor(numbers(7), activation_steps=3)
    for _ in executor:
        note(executor.step)
    assert seen == [3, 6, 7]


def test_a_second_iteration_continues_the_step_count():
    saved = []
    save = checkpoint_closure(saved.append)
    executor = DataExecutor(numbers(4), checkpoint_steps=3)
    for _ in range(2):
        for _ in executor:
            save(executor.step)
    assert saved == [3, 4, 6, 8] and executor.step == 8


def test_an_evaluation_within_the_loop_has_separate_closures():
    seen = []
    note, save = step_closure(seen.append), checkpoint_closure(seen.append)
    for _ in DataExecutor(numbers(2), activation_steps=2, checkpoint_steps=1):
        for _ in DataExecutor(numbers(2)):
            note("evaluated")
        note("trained")
        save("saved")
    assert seen == ["evaluated"] * 2 + ["saved"] + ["evaluated"] * 2 + ["trained", "saved"]


def test_leaving_a_loop_early_ends_it():
    saved = []
    save = checkpoint_closure(saved.append)
    for _ in DataExecutor(numbers(9), checkpoint_steps=5):
        save("within")
        break
    save("after")
    assert saved == ["after"]


def test_a_failed_step_does_not_end_the_loop_or_its_count():
    done = []

    @trace
    def step(batch):
        if batch[0] == 1:
            raise ValueError
        done.append(int(batch[0]))

    executor = DataExecutor(numbers(3))
    for batch in executor:
        if executor.step == 2:
            with pytest.raises(ValueError):
                step(batch)
        else:
            step(batch)
    assert done == [0, 2] and executor.step == 3


class Writer:
    flushed = 0

    def flush(self):
        self.flushed += 1


def test_the_writer_is_flushed_at_the_end():
    writer = Writer()
    for _ in DataExecutor(numbers(2), writer=writer):
        assert writer.flushed == 0
    assert writer.flushed == 1


def test_batches_go_to_the_device_of_the_backend(monkeypatch):
    batch = {"x": torch.ones(2), "more": UserDict(y=torch.ones(2, 3)), "none": None}
    assert next(iter(DataExecutor([batch]))) is batch

    class OnMeta:
        torch_device = torch.device("meta")

    monkeypatch.setattr(executor_module, "current_backend", OnMeta)
    moved = next(iter(DataExecutor([batch])))
    assert moved["x"].is_meta and moved["more"]["y"].is_meta and moved["none"] is None
    assert type(moved["more"]) is UserDict and not batch["x"].is_meta


BAD_BATCHES = {
    "an empty list": ({"text": []}, "contains no tensors"),
    "a string": (
        {"x": torch.ones(2), "text": ["a"]},
        r"batch\['text'\]\[0\] to be a tensor, got str.*collate",
    ),
    "a number": ((torch.ones(2), 3), r"batch\[1\] to be a tensor, got int"),
    "of transformers": (UserDict(ids=torch.ones(2), names="ab"), r"batch\['names'\] to be a tensor, got str"),
    "nothing": ((), "contains no tensors"),
    "none": (None, "contains no tensors"),
    "ragged list": ([torch.ones(2), torch.ones(3)], r"batch\[0\] has 2, batch\[1\] has 3"),
    "ragged mapping": (
        {"ids": torch.ones(8, 4), "labels": torch.ones(7), "mask": torch.ones(8)},
        r"batch\['ids'\] has 8, batch\['labels'\] has 7",
    ),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_error_names_the_part_of_a_batch_that_is_not_a_tensor(name):
    batch, message = BAD_BATCHES[name]
    good = torch.ones(2)
    with pytest.raises(DataError, match=r"(?s)" + message) as caught:
        list(DataExecutor([good, batch]))
    assert "step 2" in str(caught.value)


@pytest.mark.parametrize(
    "batch", [(torch.ones(2, 3), torch.tensor(1.0)), {"x": torch.ones(2), "y": None}, torch.ones(3)]
)
def test_scalars_and_none_in_a_batch_are_accepted(batch):
    assert next(iter(DataExecutor([batch]))) is batch


def test_a_smaller_last_batch_is_accepted_and_other_sizes_on_request():
    assert len(list(DataExecutor([torch.ones(4), torch.ones(3)]))) == 2
    assert len(list(DataExecutor([(torch.ones(4), torch.ones(3))], ragged=True))) == 1


BAD_LOADERS = {
    "expected a function that returns batches, got list": (ConfigError, lambda: DataLoader([1])),
    "'nothing' returned None": (DataError, lambda: list(DataLoader(nothing))),
    "returned a int, which is not iterable": (DataError, lambda: list(DataLoader(lambda: 3))),
    "the executor was given None": (DataError, lambda: DataExecutor(None)),
    "yielded no batches": (DataError, lambda: list(DataExecutor([]))),
    "yielded no batches\n.*drop_last": (
        DataError,
        lambda: list(DataExecutor(DataLoader(lambda: iter([])), 3)),
    ),
    "ended after 2 of 5 batches": (DataError, lambda: list(DataExecutor(iter(numbers(2)), 5))),
    "expected num_steps to be an integer >= 1, got 0": (ConfigError, lambda: DataExecutor([], num_steps=0)),
    "expected num_steps to be an integer >= 1, got 1.5": (
        ConfigError,
        lambda: DataExecutor([], num_steps=1.5),
    ),
    "expected checkpoint_steps to be an integer": (
        ConfigError,
        lambda: DataExecutor([], checkpoint_steps=-1),
    ),
    "expected activation_steps to be an integer": (
        ConfigError,
        lambda: DataExecutor([], activation_steps=True),
    ),
}


def nothing():
    return None


@pytest.mark.parametrize("message", BAD_LOADERS)
def test_an_error_explains_why_a_loader_has_no_batches(message):
    error, make = BAD_LOADERS[message]
    with pytest.raises(error, match=message):
        make()


def test_more_ranks_than_cores_are_refused():
    assert CSConfig().num_csx == CSConfig(num_csx=1).num_csx == 1
    with pytest.raises(ConfigError, match=r"(?s)cores of this machine\), got 4096.*write 1"):
        CSConfig(num_csx=4096)
    for wrong in (0, "1", True):
        with pytest.raises(ConfigError, match="expected num_csx to be an integer"):
            CSConfig(num_csx=wrong)


def test_cluster_options_are_ignored_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(CSConfig, "_has_warned", False)
    CSConfig(num_csx=1, max_wgt_servers=2, num_workers_per_csx=3)
    CSConfig(mount_dirs=["/data"])
    assert [record.getMessage() for record in caplog.records] == [
        "CSConfig: ignored options (the plan decides): max_wgt_servers, num_workers_per_csx"
    ]
    with pytest.raises(ConfigError, match=r"(?s)'num_worker_per_csx'.*write 'num_workers_per_csx'"):
        CSConfig(num_worker_per_csx=1)
