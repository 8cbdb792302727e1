package postgres

import (
	"net"
	"os"
	"syscall"
)

// tcpUserTimeout is TCP_USER_TIMEOUT of tcp(7), in milliseconds, which package syscall does not name.
const tcpUserTimeout = 0x12

// endUnacknowledged ends the connection when what was sent has not been acknowledged for silentTimeout.
func endUnacknowledged(conn *net.TCPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	err = raw.Control(func(fd uintptr) {
		set = os.NewSyscallError("setsockopt", syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout,
			int(silentTimeout.Milliseconds())))
	})
	if err != nil {
		return err
	}
	return set
}
