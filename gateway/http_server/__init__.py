"""HTTP/1.1 on a socket: how many connections there may be, what each may send, and how long each may take."""
