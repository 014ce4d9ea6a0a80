"""HTTP/1.1 server that limits connections, what each may send, and how long each may take."""
