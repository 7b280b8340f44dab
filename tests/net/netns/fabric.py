"""Hosts with several network cards, joined as clusters join them: network namespaces around one that is the switch."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from pathlib import Path

from network import Agent, NotPermitted, run

_LIGHT = Path(__file__).with_name("light.py")
_PATIENCE_S = 60


class Fabric:
    """Hosts of which `cards` says which rails each has a card on; what a card sends is limited to 200 Mbit/s.

    Kinds: `rails`, a network for each rail; `ipv6`, the same with IPv6 alone; `shared`, one network for all cards, with
    rules by the source's address; `routed`, a /32 address and a gateway for each card, with rules as well. The default
    route of a host leads over its first card.
    """

    def __init__(self, kind: str, cards: list[list[int]]) -> None:
        if not shutil.which("ip") or not shutil.which("tc"):
            raise NotPermitted("ip or tc is not installed")
        # One that was killed may have left others.
        prefix = f"tx{secrets.token_hex(3)}"
        self.kind, self.cards = kind, cards
        self.switch = f"{prefix}w"
        self.hosts = [f"{prefix}h{number}" for number in range(len(cards))]
        self._made: list[str] = []
        self._agents: list[Agent] = []
        try:
            for name in (self.switch, *self.hosts):
                run("ip", "netns", "add", name)
                self._made.append(name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            self._settings(self.switch, "net/ipv4/ip_forward=1")
            for rail in sorted({rail for of_host in cards for rail in of_host}) if kind != "routed" else ():
                if kind != "shared" or rail == 0:
                    run("ip", "-n", self.switch, "link", "add", f"br{rail}", "type", "bridge")
                    run("ip", "-n", self.switch, "link", "set", f"br{rail}", "up")
            for number, of_host in enumerate(cards):
                name = self.hosts[number]
                # Where cards share a network, each answers for its own address alone.
                self._settings(name, "net/ipv4/conf/all/rp_filter=0", "net/ipv4/conf/default/rp_filter=0")
                self._settings(name, "net/ipv4/conf/all/arp_ignore=1", "net/ipv4/conf/all/arp_announce=2")
                for rail in of_host:
                    self._plug(number, rail)
                gateway = ("via", f"10.80.{of_host[0]}.254", "onlink") if kind == "routed" else ()
                family = ("-6",) if kind == "ipv6" else ()
                run("ip", *family, "-n", name, "route", "add", "default", *gateway, "dev", f"card{of_host[0]}")
        except BaseException:
            self.remove()
            raise

    def _plug(self, number: int, rail: int) -> None:
        """Gives a host its card on a rail."""
        name, card, port = self.hosts[number], f"card{rail}", f"p{number}x{rail}"
        run("ip", "-n", name, "link", "add", card, "type", "veth", "peer", "name", port, "netns", self.switch)
        if self.kind != "routed":
            bridge = "br0" if self.kind == "shared" else f"br{rail}"
            run("ip", "-n", self.switch, "link", "set", port, "master", bridge)
        run("ip", "-n", self.switch, "link", "set", port, "up")
        own, table = self.address(number, rail), str(100 + rail)
        bits = {"ipv6": "64", "routed": "32"}.get(self.kind, "24")
        run("ip", "-n", name, "address", "add", f"{own}/{bits}", "dev", card, *(("nodad",) if ":" in own else ()))
        run("ip", "-n", name, "link", "set", card, "up")
        if self.kind == "shared":
            run("ip", "-n", name, "route", "add", "10.80.0.0/24", "dev", card, "src", own, "table", table)
        if self.kind == "routed":
            gateway = f"10.80.{rail}.254"
            run("ip", "-n", self.switch, "address", "add", f"{gateway}/32", "dev", port)
            run("ip", "-n", self.switch, "route", "add", f"{own}/32", "dev", port)
            run("ip", "-n", name, "route", "add", "default", "via", gateway, "dev", card, "onlink", "table", table)
        if self.kind in ("shared", "routed"):
            run("ip", "-n", name, "rule", "add", "from", own, "lookup", table)
        shape = ("tbf", "rate", "200mbit", "burst", "64kb", "latency", "100ms")
        run("tc", "-n", name, "qdisc", "add", "dev", card, "root", *shape)

    def _settings(self, host: str, *settings: str) -> None:
        for setting in settings:
            path, _, value = setting.partition("=")
            run("ip", "netns", "exec", host, "sh", "-c", f"echo {value} > /proc/sys/{path}")

    def address(self, number: int, rail: int) -> str:
        """Returns the address of a host's card."""
        if self.kind == "ipv6":
            return f"fd00:80:{rail + 1}::{number + 1}"
        return f"10.80.0.{16 * (number + 1) + rail}" if self.kind == "shared" else f"10.80.{rail}.{number + 1}"

    def agent(self, number: int, role: str, **options: object) -> Agent:
        """Starts a process in a host."""
        agent = Agent(self.hosts[number], role, _LIGHT, **options)
        self._agents.append(agent)
        return agent

    def carried(self, number: int, rail: int, way: str) -> int:
        """Returns the bytes that a card has sent (`tx`) or received (`rx`)."""
        path = f"/sys/class/net/card{rail}/statistics/{way}_bytes"
        command = ("ip", "netns", "exec", self.hosts[number], "cat", path)
        return int(subprocess.run(command, capture_output=True, check=True, timeout=_PATIENCE_S).stdout)

    def cut(self, number: int, rail: int) -> None:
        """Takes a card down, without closing any connection."""
        run("ip", "-n", self.hosts[number], "link", "set", f"card{rail}", "down")

    def swallow(self, number: int, rail: int) -> None:
        """Lets hardly anything of what a host sends over a card arrive."""
        shape = ("tbf", "rate", "1kbit", "burst", "1kb", "latency", "1ms")
        run("tc", "-n", self.hosts[number], "qdisc", "replace", "dev", f"card{rail}", "root", *shape)

    def remove(self) -> None:
        """Ends the processes and removes the hosts."""
        for agent in self._agents:
            agent.end()
        for name in self._made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=_PATIENCE_S, check=False)
        self._agents, self._made = [], []
