"""Replicas of a torchft job in one process: quorums as torchft's, a store as the job's, and real transports."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

from exchange import figure
from networked import networked
from tensorferry import HTTPTransport
from tensorferry.torchft.replica_sources import ReplicaSources

TIMEOUT = timedelta(seconds=20)
#: The prefix of the keys of a quorum that `quorum` makes.
KEYS = "tensorferry/sources/cae66941d9efbd404e4d88758ea67670/3/7/0"


class Client:
    """Answers as torchft's ManagerClient does."""

    def __init__(self):
        self.quorum = None

    def _quorum(self, **asked):
        del asked
        return self.quorum

    def should_commit(self, vote):
        return vote


class Replica:
    """What a Manager does in a quorum, with the transport of one replica."""

    def __init__(self, rank, state, **options):
        self.rank, self.state = rank, state
        about = {"same_host": False, "interface": "127.0.0.1", "metrics_port": "20000-29000"}
        self.transport = HTTPTransport(TIMEOUT, **networked(about | options))
        self.client = Client()
        self.sources = ReplicaSources(self.client, self.transport, 0)

    def ask(self, publish=True, **quorum):
        """Gets a quorum, and sends if it says so and nothing is in the way; returns it."""
        self.client.quorum = SimpleNamespace(
            **{
                "quorum_id": 3,
                "replica_rank": self.rank,
                "max_replica_rank": self.rank,
                "max_step": 7,
                "replica_ids": [],
                "heal": False,
                "recover_dst_replica_ranks": [],
                **quorum,
            }
        )
        told = self.sources._quorum(group_rank=0)
        if told.recover_dst_replica_ranks and publish:
            self.transport.send_checkpoint(told.recover_dst_replica_ranks, told.max_step, self.state, TIMEOUT)
        return told

    def settle(self):
        """Waits until the store has what this replica has announced."""
        if self.sources._last is not None:
            self.sources._last.result(20)


def common(store, replicas, **more):
    return {
        "replica_world_size": len(replicas),
        "max_world_size": len(replicas) - 1,
        "store_address": f"127.0.0.1:{store.port}",
        **more,
    }


def quorum(store, replicas, **more):
    """All get a quorum in which the last one heals from the first one."""
    about = common(store, replicas, **more)
    *healthy, healing = replicas
    for each in healthy:
        each.ask(**about, **({"recover_dst_replica_ranks": [healing.rank]} if each.rank == 0 else {}))
        each.settle()
    healing.ask(**about, heal=True, max_replica_rank=None)


def heal(replicas, timeout=TIMEOUT):
    return replicas[-1].transport.recv_checkpoint(0, replicas[0].transport.metadata(), 7, timeout)


def sent(replica):
    """How many bytes of checkpoints a replica has sent."""
    return figure(replica.transport, "sent_bytes_total")
