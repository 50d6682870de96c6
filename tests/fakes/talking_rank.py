"""A rank that talks: it tells its peer a number every 20 ms over TCP and notes each number that it hears.

`talking_rank.py listen|connect DIRECTORY NAME`: the listener leaves its port in DIRECTORY/port; each appends
"<time.time()> <number>" to DIRECTORY/NAME.heard, and writes "gone" there when the connection ends.
"""

import os
import socket
import sys
import threading
import time
from pathlib import Path


def main(role: str, directory: Path, name: str) -> None:
    connection = listen(directory / "port") if role == "listen" else dial(directory / "port")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=tell, args=(connection,), daemon=True).start()
    rest = b""
    with (directory / f"{name}.heard").open("a", buffering=1) as heard:
        while chunk := connection.recv(65536):
            *numbers, rest = (rest + chunk).split(b"\n")
            for number in numbers:
                heard.write(f"{time.time()} {number.decode()}\n")
        heard.write("gone\n")


def listen(port: Path) -> socket.socket:
    server = socket.create_server(("127.0.0.1", 0))
    aside = port.with_suffix(".new")
    aside.write_text(str(server.getsockname()[1]))
    aside.replace(port)
    return server.accept()[0]


def dial(port: Path) -> socket.socket:
    while not port.exists():
        time.sleep(0.02)
    return socket.create_connection(("127.0.0.1", int(port.read_text())))


def tell(connection: socket.socket) -> None:
    number = 0
    while True:
        number += 1
        try:
            connection.sendall(b"%d\n" % number)
        except OSError:
            os._exit(1)
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
