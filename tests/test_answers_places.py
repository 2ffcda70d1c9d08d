"""`eval.answers --ray`: workers that wait for a place get that of those that have no more to do."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from eval import answers
from eval.answers import room


class Cluster:
    """Of Ray what is used, with so many places; a task of a worker without one is never ready."""

    def __init__(self, places, nodes):
        self.places, self.workers, self.machines = places, [], nodes

    def remote(self, **options):
        return lambda made: SimpleNamespace(remote=self.worker)

    def worker(self, args):
        made = SimpleNamespace(
            described=SimpleNamespace(remote=lambda: Task(made, {})),
            answer=SimpleNamespace(remote=lambda question: Task(made, {"question_id": question.id})))
        self.workers.append(made)
        return made

    def get(self, task):
        return task.result

    def wait(self, tasks):
        ready = [task for task in tasks if task.worker in self.workers[: self.places]]
        assert ready, "it would wait for ever"
        return ready[:1], []

    def kill(self, worker):
        self.workers.remove(worker)

    def available_resources(self):
        return {"CPU": 8.0}

    def nodes(self):
        return self.machines


@dataclass(eq=False)
class Task:
    """What `remote` returns."""

    worker: object
    result: dict


@pytest.mark.parametrize(("workers", "questions"), [(3, 3), (3, 7), (5, 5), (1, 4)])
def test_every_question_is_answered_with_fewer_places_than_workers(workers, questions, monkeypatch, tmp_path):
    cluster, written = Cluster(2, []), []

    monkeypatch.setattr(answers, "connected", lambda address: cluster)
    monkeypatch.setattr(answers, "append_lines", lambda path, lines: written.extend(lines))
    args = SimpleNamespace(ray="auto", cpus=1, gpus=0, workers=workers, name="x", answers=tmp_path / "a")
    asked = [SimpleNamespace(id=number) for number in range(questions)]
    answers.answer_in_cluster(args, asked, lambda made_with, count: None)
    assert sorted(each["question_id"] for each in written) == list(range(questions)) and cluster.workers == []


@pytest.mark.parametrize(("free", "nodes", "cpus", "gpus", "expected"), [
    ({"CPU": 8}, [{"CPU": 4}, {"CPU": 4}], 3, 0, 2),  # not 2.67 in all
    ({"CPU": 6}, [{"CPU": 3}, {"CPU": 3}], 2, 0, 2),  # three would fit in all
    ({"CPU": 16, "GPU": 2}, [{"CPU": 8, "GPU": 2}, {"CPU": 8}], 4, 1, 2),
    ({"CPU": 2}, [{"CPU": 8}], 1, 0, 2),  # others work there
])
def test_no_worker_lies_on_two_machines(free, nodes, cpus, gpus, expected):
    args = SimpleNamespace(cpus=cpus, gpus=gpus)
    alive = [{"Resources": each, "Alive": True} for each in nodes]
    assert room(free, [*alive, {"Resources": {"CPU": 64, "GPU": 8}, "Alive": False}], args) == expected


def test_no_room_at_all():
    with pytest.raises(ValueError, match="no room for a worker of 4 cores and 0 GPUs on a machine; free in all are 6"):
        room({"CPU": 6}, [{"Resources": {"CPU": 3}, "Alive": True}] * 2, SimpleNamespace(cpus=4, gpus=0))
