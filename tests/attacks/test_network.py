"""Every way to speak with somebody outside."""

import asyncio
import socket

import pytest

from composer_jax.sandbox import LocalSandboxPool, SandboxLimits

CALLS = {
    "tcp_to_the_host": ("socket.create_connection({tcp}, 1)", "ECONNREFUSED"),
    "tcp_to_a_gateway": ("socket.create_connection(('10.0.0.1', 80), 1)", "ENETUNREACH"),
    "tcp_to_the_world": ("socket.create_connection(('1.1.1.1', 53), 1)", "ENETUNREACH"),
    "tcp6_to_the_world": ("socket.create_connection(('2606:4700:4700::1111', 53), 1)", "ENETUNREACH"),
    "tcp_to_cloud_metadata": ("socket.create_connection(('169.254.169.254', 80), 1)", "ENETUNREACH"),
    "tcp_without_a_handshake": (
        "socket.socket().sendto(b'x', 0x20000000, ('1.1.1.1', 443))",  # TCP fast open
        "ENETUNREACH",
    ),
    "udp_to_the_host": (
        "s = socket.socket(type=socket.SOCK_DGRAM)\ns.connect({udp})\ns.send(b'x')\nreturn s.send(b'x')",
        "ECONNREFUSED",  # its own loopback: no listener
    ),
    "udp_to_the_world": ("socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('1.1.1.1', 53))", "ENETUNREACH"),
    "broadcast": (
        "s = socket.socket(type=socket.SOCK_DGRAM)\ns.setsockopt(1, socket.SO_BROADCAST, 1)\n"
        "return s.sendto(b'x', ('255.255.255.255', 53))",
        "ENETUNREACH",
    ),
    "multicast": ("socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('224.0.0.1', 53))", "ENETUNREACH"),
    "abstract_socket": ("socket.socket(socket.AF_UNIX).connect('\\0{abstract}')", "ECONNREFUSED"),
    "socket_file_of_the_host": ("socket.socket(socket.AF_UNIX).connect({file!r})", "ENOENT"),
    "bind_to_a_device": ("socket.socket().setsockopt(1, 25, b'eth0')", "ENODEV"),
    "make_a_device": ("fcntl.ioctl(os.open('/dev/net/tun', os.O_RDWR), 0x400454CA, bytes(40))", "ENOENT"),
    "configure_loopback": (
        "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sH14x', b'lo', 0))",  # SIOCSIFFLAGS
        "EPERM",
    ),
    "low_port": ("socket.socket().bind(('127.0.0.1', 80))", "EACCES"),
}


def test_speaking_with_the_outside(host, attempts, tmp_path):
    def filled(body):
        body = body.replace("{tcp}", repr(host.tcp.getsockname())).replace("{udp}", repr(host.udp.getsockname()))
        return body.replace("{abstract}", host.abstract_name).replace("{file!r}", repr(str(tmp_path / "socket")))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        answers = attempts({name: filled(body) for name, (body, _) in CALLS.items()})
        assert answers == {name: error for name, (_, error) in CALLS.items()}
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_looking_up_a_name(attempt):
    assert (
        attempt("try: return socket.getaddrinfo('example.com', 80)\nexcept socket.gaierror: raise OSError(2, '')")
        == "ENOENT"
    )


def test_there_is_only_loopback(attempt):
    assert attempt("[name for _, name in socket.if_nameindex()] and 'devices'") in ("EAFNOSUPPORT", "DID devices")
    assert attempt("[line.split()[0] for line in open('/proc/self/net/dev')][2:]") == "DID ['lo:']"


FAMILIES = {
    "ax25": 3, "ipx": 4, "appletalk": 5, "x25": 9, "decnet": 12, "key": 15, "netlink": 16, "packet": 17, "rds": 21,
    "ppp": 24, "llc": 26, "infiniband": 27, "mpls": 28, "can": 29, "tipc": 30, "bluetooth": 31, "rxrpc": 33, "isdn": 34,
    "phonet": 35, "ieee802154": 36, "caif": 37, "kernel_crypto": 38, "nfc": 39, "vsock": 40, "kcm": 41, "qipcrtr": 42,
    "smc": 43, "xdp": 44, "mctp": 45,
}  # fmt: skip


def test_families_that_pass_the_network_namespace_or_are_full_of_holes(attempts):
    body = """
    refused = set()
    for kind in (1, 2, 3, 4, 5):
        for call in (socket.socket, socket.socketpair):
            try: return call({family}, kind, 0)
            except OSError as error: refused.add(error.errno)
    assert refused == {{errno.EAFNOSUPPORT}}, refused
    raise OSError(errno.EAFNOSUPPORT, "all of them")
    """
    answers = attempts({name: body.format(family=family) for name, family in FAMILIES.items()})
    assert set(answers.values()) == {"EAFNOSUPPORT"}, answers


RAW = {"ipv4": "2, 3, 1", "ipv6": "10, 3, 58", "any_protocol": "2, 3, 255"}


def test_raw_sockets(attempts):
    answers = attempts({name: f"socket.socket({arguments})" for name, arguments in RAW.items()})
    assert set(answers.values()) == {"EPERM"}, answers


def test_a_family_hidden_in_the_high_half_of_the_argument(attempt):
    """The kernel looks at 32 bits of it, and so must the filter."""
    assert attempt("syscall(41, 198, ctypes.c_uint64(16 + (1 << 32)), 3, 0)") == "EAFNOSUPPORT"


REACH = """
import errno, socket
for address in ({tcp!r}, "\\0{abstract}"):
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    try: print("DID", socket.socket(family).connect(address))
    except OSError as error: print(errno.errorcode[error.errno])
print([line.split()[0] for line in open("/proc/self/net/dev")][2:] == ["lo:"])
"""


def test_without_network_in_a_pool_that_has_one(host):
    """Others of the same pool reach the host: that is the positive control."""
    code = REACH.format(tcp=host.tcp.getsockname(), abstract=host.abstract_name)

    async def go():
        async with LocalSandboxPool(SandboxLimits(), size=3, network=True) as pool:
            async with await pool.acquire({}) as warm, await pool.acquire({}, pool.tree()) as other:
                fork = await other.fork()
                for sandbox in (warm, other, fork):
                    result = await sandbox.run(["python", "-c", code])
                    assert result.stdout == "ECONNREFUSED\nECONNREFUSED\nTrue\n", result
                    shell = await sandbox.shell(f"python -c '{code.replace(chr(39), chr(34))}'")
                    assert shell.stdout == result.stdout, shell
            own = socket.create_server(("127.0.0.1", 0))
            with own:
                async with await pool.acquire({}, network=True) as connected:
                    reach = f"import socket; socket.create_connection({own.getsockname()!r}).sendall(b'control')"
                    assert (await connected.run(["python", "-c", reach])).outcome == "ok"
                    with own.accept()[0] as caller:
                        assert caller.recv(7) == b"control"

    asyncio.run(go())
