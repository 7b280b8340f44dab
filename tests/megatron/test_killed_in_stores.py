"""A save into a bucket whose ranks are killed at any request leaves the last checkpoint.

``--object-kills 99`` kills one at each request.
"""

from __future__ import annotations

import os
import signal

import pytest
from placed import RELEASES, Job
from test_errors import outcome
from test_struck import GROUP_S, SHORT, check, states

from stores import BUCKET, Gateway, environment, moments, moto

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def save(kept, variables, url, count):
    import tensorferry.megatron as ours

    del kept
    os.environ.update(variables)
    return outcome(lambda: ours.save(states(count), url, ours.save_strategy(timeout=SHORT)))


def test_kill_9_at_the_requests_of_a_save(host, pytestconfig):
    if host.release != RELEASES[-1]:
        pytest.skip("the same with every release")
    url = f"s3://{BUCKET}/killed"
    with moto() as address, Gateway(address) as between:
        variables = environment(between.url)

        def saved(count):
            return host.job(2).run(save, variables, url, count)

        fine = saved(1)
        between.seen.clear()
        assert saved(2) == fine
        last, seen = 2, list(between.seen)
        for at in moments(seen, pytestconfig.getoption("--object-kills")):
            job, victim, killed = Job(host, 2, GROUP_S, over_tcp=True), at % 2, []

            def act(request, *_, at=at, pid=job.pids[victim], killed=killed):
                if request != at:
                    return None
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                return "break"

            between.seen.clear()
            between.act = act
            try:
                job.start(save, variables, url, 100 + at)
                # The other one is done, or gives up.
                assert job._pipes[1 - victim].poll(60), f"killed at request {at}: the other rank waits"
            finally:
                job.kill()
                between.act = lambda *_: None
            assert killed, f"request {at} was not made"
            (numbers,) = {frozenset(one) for one in host.job(2).run(check, url)}
            assert numbers in ({last}, {100 + at}), f"killed at request {at} of {len(seen)}"
            last = 1000 + at
            assert saved(last) == fine
            (numbers,) = {frozenset(one) for one in host.job(2).run(check, url)}
            assert numbers == {last}
