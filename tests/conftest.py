import logging
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from tiny import tiny_pair, tiny_tokenizer

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--write-tables", action="store_true", help="write docs/results/families.md from what they find")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def latencies(tmp_path_factory):
    """Latencies that are measured here are not kept for the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE_FSD_CACHE", str(tmp_path_factory.mktemp("latencies")))
        # Tests run beside one another, where what one of them measured soon looks slow.
        patch.setattr("eagle_fsd.loading.timing.share_of", lambda *_: 1.0)
        patch.setattr("eagle_fsd.loading.timing.ROUNDS", 3)  # nothing here goes by how exact they are
        yield


@pytest.fixture(scope="module", autouse=True)
def accelerate_state():
    """Accelerate keeps the precision of the first training in a process for all later ones."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module", autouse=True)
def loggers():
    """What a module does to the loggers would decide what tests after it in the same process find in `caplog`."""
    yield
    changed = [name for name, logger in logging.Logger.manager.loggerDict.items() if name.startswith("eagle_fsd")
               and isinstance(logger, logging.Logger) and (logger.level or logger.disabled or not logger.propagate)]
    assert not changed and logging.getLogger().level == logging.WARNING


@pytest.fixture
def homeless(tmp_path, monkeypatch):
    """A user without HOME and without an entry in the system; the empty working directory."""
    for name in ("HOME", "XDG_CACHE_HOME", "EAGLE_FSD_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    (tmp_path / "working").mkdir()
    monkeypatch.chdir(tmp_path / "working")
    return tmp_path / "working"


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def pair(tokenizer):
    """A fresh Llama pair with a tokenizer; tests may change it."""
    return tiny_pair(tokenizer=tokenizer)


@pytest.fixture(scope="module")
def model():
    """A pair for long texts, shared by the tests of a module."""
    return tiny_pair(tokenizer=tiny_tokenizer(), max_position_embeddings=2048)


@pytest.fixture
def plots(monkeypatch):
    """What saved figures show, by file name: for each panel its title and the names in its legend."""
    from matplotlib.figure import Figure

    shown, save = {}, Figure.savefig

    def savefig(figure, path, **options):
        save(figure, path, **options)
        shown[Path(path).name] = [(axes.get_title(), axes.get_legend_handles_labels()[1]) for axes in figure.axes]

    monkeypatch.setattr(Figure, "savefig", savefig)
    return shown
