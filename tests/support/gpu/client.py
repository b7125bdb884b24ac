"""In the place of Python: lets ``server.py`` run a module. Arguments: its socket, then those of Python."""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    job = {"arguments": sys.argv[2:], "env": dict(os.environ), "cwd": os.getcwd()}
    socket.send_fds(connection, [json.dumps(job).encode()], [1, 2])
    sys.exit(int(connection.recv(16) or b"1"))
