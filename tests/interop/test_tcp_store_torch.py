# SPDX-License-Identifier: Apache-2.0
# ctest: labels=deep timeout=180
"""torch's own TCPStore and ours: each end as server, the other as client.

torch is looked for in this Python, else in the one that FERRY_TORCH_PYTHON
names; without it the test is skipped."""

import os
import pathlib
import subprocess
import sys
import threading
from datetime import timedelta

OTHER = os.environ.get("FERRY_TORCH_PYTHON")
try:
    from torch.distributed import TCPStore
except ImportError:
    if OTHER and "FERRY_TORCH_TRIED" not in os.environ:
        os.environ["FERRY_TORCH_TRIED"] = "1"
        os.execv(OTHER, [OTHER, __file__])
    print("skipped: torch is not installed (FERRY_TORCH_PYTHON names a Python)")
    sys.exit(77)

DRIVER = pathlib.Path(os.environ["FERRY_BUILD_DIR"]) / "tests/store_driver_main"
BOUND = timedelta(seconds=10)


class Driver:
    """Our end, as a process that is spoken to by lines."""

    def __init__(self, *args):
        self.process = subprocess.Popen(
            [DRIVER, *map(str, args)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, bufsize=1)
        self.first = self.process.stdout.readline().strip()

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        return self.process.stdout.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        assert self.process.wait(timeout=10) == 0
        self.process.stdout.close()


def torch_client(port, host="127.0.0.1", world_size=None, wait=False):
    return TCPStore(host, port, world_size=world_size, is_master=False,
                    wait_for_workers=wait, timeout=BOUND, use_libuv=False)


def torch_server(libuv, world_size=None, wait=False):
    return TCPStore("127.0.0.1", 0, world_size=world_size, is_master=True,
                    wait_for_workers=wait, timeout=BOUND, use_libuv=libuv)


def fails(call):
    try:
        call()
    except Exception:  # torch has one error class for each way of failing
        return True
    return False


def torch_joins_ours(host):
    with Driver("serve", host) as server:
        port = int(server.first)
        a = torch_client(port, host)
        b = torch_client(port, host)
        a.set("k", "val")
        assert b.get("k") == b"val"
        a.set("bytes", bytes(range(256)).decode("latin1"))
        assert len(b.get("bytes")) == 384  # as UTF-8
        assert a.add("n", 5) == 5 and b.add("n", -2) == 3
        assert a.get("n") == b"3"
        assert a.check(["k", "n"]) and not a.check(["k", "zz"])
        assert a.check([])
        assert a.num_keys() == 3
        assert a.delete_key("k") and not a.delete_key("k")
        assert a.compare_set("q", "", "new") == b"new"
        assert a.compare_set("q", "new", "new2") == b"new2"
        assert a.compare_set("q", "xx", "new3") == b"new2"
        assert a.compare_set("q2", "xx", "new3") == b"xx"
        assert not a.check(["q2"])
        a.append("ap", "ab")
        a.append("ap", "cd")
        assert b.get("ap") == b"abcd"
        a.multi_set(["m1", "m2"], ["v1", "v22"])
        assert b.multi_get(["m1", "m2"]) == [b"v1", b"v22"]
        a.set("", "")
        assert b.get("") == b""
        # A wait that is given up leaves the connection as it was.
        assert fails(lambda: a.wait(["never"], timedelta(milliseconds=300)))
        assert a.add("n", 1) == 4
        # A wait that another's set ends.
        timer = threading.Timer(0.2, lambda: b.set("late", "x"))
        timer.start()
        a.wait(["late", "n"], BOUND)
        timer.join()
        big = "x" * 4_000_000
        a.set("big", big)
        assert b.get("big") == big.encode()
        clone = a.clone()
        assert clone.get("n") == b"4"
        # What torch's server answers by closing: so do we, for that one.
        assert fails(lambda: clone.add("ap", 1))
        assert a.add("n", 1) == 5


def torch_workers_are_counted():
    with Driver("serve") as server:
        port = int(server.first)
        with Driver("client", "127.0.0.1", port) as master:
            assert master.ask("join") == "1"
            workers = [torch_client(port, world_size=3, wait=True)
                       for _ in range(2)]
            assert master.ask("joined 3") == "ok"
            master.ask("set hello world")
            assert all(w.get("hello") == b"world" for w in workers)


def ours_joins_torch(libuv):
    server = torch_server(libuv)
    with Driver("client", "127.0.0.1", server.port) as c:
        assert c.first == "open"
        assert c.ask("set k val") == "ok"
        assert server.get("k") == b"val"
        server.set("t", "torch")
        assert c.ask("get t") == "value torch"
        assert c.ask("add n 5") == "5" and c.ask("add n -2") == "3"
        assert c.ask("check k n") == "ok" and c.ask("check k zz") == "no"
        assert c.ask("delete k") == "1" and c.ask("delete k") == "0"
        assert c.ask("cas q - new") == "value new"
        assert c.ask("cas q new new2") == "value new2"
        assert c.ask("cas q xx new3") == "value new2"
        assert c.ask("append ap ab") == "ok" and c.ask("append ap cd") == "ok"
        assert c.ask("mset m1 v1 m2 v22") == "ok"
        assert c.ask("mget m1 m2 ap") == "values v1 v22 abcd"
        assert c.ask("wait 300 n never").startswith("error ETIMEOUT")
        assert c.ask("add n 1") == "4"
        timer = threading.Timer(0.2, lambda: server.set("late", "x"))
        timer.start()
        assert c.ask("wait 10000 late n") == "ok"
        timer.join()
        assert c.ask("num") == str(server.num_keys())


def torch_master_waits_for_ours(libuv):
    made = []
    probe = torch_server(libuv)
    port = probe.port
    del probe  # free again: a master that waits cannot tell its port before

    def master():
        made.append(TCPStore("127.0.0.1", port, world_size=2, is_master=True,
                             wait_for_workers=True, timeout=BOUND,
                             use_libuv=libuv))

    thread = threading.Thread(target=master)
    thread.start()
    with Driver("client", "127.0.0.1", port) as c:
        assert int(c.ask("join")) in (1, 2)
        thread.join(timeout=15)
        assert not thread.is_alive() and made


def main():
    torch_joins_ours("127.0.0.1")
    if pathlib.Path("/proc/net/if_inet6").exists():
        torch_joins_ours("::1")
    torch_workers_are_counted()
    for libuv in (False, True):
        ours_joins_torch(libuv)
        torch_master_waits_for_ours(libuv)
    print("all good")


if __name__ == "__main__":
    main()
