"""Replicas on a Ray cluster of this machine, one of which is killed; skipped where Ray is not installed."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from served import SMALL

import eagle_fsd

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
PROMPTS = [f"What is {number} plus {number + 8}?" for number in range(10, 30)]
SETTINGS = {"name": "small", "device": "cpu", "dtype": "float32", "max_rows": 2, "max_waiting": 32,
            "tree": {"total_tokens": 16, "depth": 5, "top_k": 4}}


@pytest.fixture(scope="module")
def cluster():
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False,
                 object_store_memory=80 * 2**20)
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module")
def url(cluster):
    from ray import serve

    from eagle_fsd.serve.ray import Replica

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    target, draft = SMALL
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    two = Replica.options(num_replicas=2, ray_actor_options={"num_cpus": 1})
    serve.run(two.bind({"target": target, "draft": draft, **SETTINGS}), name="eagle", route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def replicas(ray):
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)
            if "EagleFsd" in actor["name"] and "REPLICA" in actor["name"].upper()]


def test_a_replica_is_killed_and_every_request_ends_right(cluster, url):
    """100 requests of 8 clients: the right text, or an error that says to try again, after which it is right."""
    pair = eagle_fsd.load(*SMALL, device="cpu", dtype="float32")
    expected = [eagle_fsd.generate([{"role": "user", "content": prompt}], pair, max_new_tokens=32,
                                   tree=eagle_fsd.TreeConfig(**SETTINGS["tree"])).text for prompt in PROMPTS]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    answered = threading.Semaphore(0)

    def ask(number):
        prompt = PROMPTS[number % len(PROMPTS)]
        for _ in range(60):
            try:
                answer = client.chat.completions.create(model="small", max_tokens=32,
                                                        messages=[{"role": "user", "content": prompt}])
                answered.release()
                return answer.choices[0].message.content == expected[number % len(PROMPTS)]
            except (openai.InternalServerError, openai.APIConnectionError, openai.RateLimitError):
                time.sleep(0.25)
        return False

    before = replicas(cluster)
    assert len(before) == 2
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(ask, number) for number in range(100)]
        for _ in range(20):
            answered.acquire(timeout=60)
        cluster.kill(cluster.get_actor(before[0], namespace="serve"))
        assert [each.result() for each in found] == [True] * 100
    end = time.monotonic() + 60
    while len(set(replicas(cluster)) - {before[0]}) < 2 and time.monotonic() < end:
        time.sleep(0.5)
    assert len(set(replicas(cluster)) - {before[0]}) == 2  # another one has come


@pytest.mark.parametrize(("settings", "said"), [
    ({"thresold": 1}, "unknown option 'thresold'"), ({"port": 80}, "args must not contain port"),
    ({"max_rows": 0}, "max_rows must be at least 1"), ({"threshold": -1}, "threshold of rule 'fsd' must lie in"),
    ({"draft": "a head", "temperature": -1}, "temperature must be"),
])
def test_wrong_options_are_refused_before_anything_is_deployed(settings, said):
    from eagle_fsd.serve.ray import app

    with pytest.raises((TypeError, ValueError), match=said):
        app(settings)
