"""A plain TCP stream between two nodes, for replication.py: as many bytes as a replica, by processes that have nothing to do with the job.

python raw_stream.py receive ADDRESS PORT BYTES
python raw_stream.py send ADDRESS PORT BYTES
"""

import socket
import sys
import time

PIECE = 1 << 20
CONNECT_S = 20.0


def receive(address: str, port: int, nbytes: int) -> None:
    buffer = bytearray(PIECE)
    with socket.create_server((address, port)) as server:
        connection, _ = server.accept()
        with connection:
            while nbytes > 0 and (arrived := connection.recv_into(buffer)):
                nbytes -= arrived
            connection.sendall(b"!")


def send(address: str, port: int, nbytes: int) -> None:
    piece, end = bytes(PIECE), time.monotonic() + CONNECT_S
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_S)
            break
        except ConnectionRefusedError:  # the other one is still starting
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
    with connection:
        connection.settimeout(None)
        for sent in range(0, nbytes, PIECE):
            connection.sendall(memoryview(piece)[: nbytes - sent])
        connection.recv(1)


if __name__ == "__main__":
    {"send": send, "receive": receive}[sys.argv[1]](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
