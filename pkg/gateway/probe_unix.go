//go:build unix

package gateway

import (
	"errors"
	"net"
	"syscall"
)

// probe tells whether an idle connection is as its last exchange has left it: neither closed by the worker, nor with
// bytes that nobody asked for. No goroutine reads from it meanwhile.
type probe struct {
	conn syscall.RawConn
	ask  func(fd uintptr) bool
	open bool
	byte [1]byte
}

// newProbe returns nil for a connection that is not of the system.
func newProbe(conn net.Conn) *probe {
	system, is := conn.(syscall.Conn)
	if !is {
		return nil
	}
	raw, err := system.SyscallConn()
	if err != nil {
		return nil
	}
	p := &probe{conn: raw}
	p.ask = func(fd uintptr) bool {
		_, _, err := syscall.Recvfrom(int(fd), p.byte[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		p.open = errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EINTR)
		return true
	}
	return p
}

// quiet says whether an exchange may begin. A nil probe takes it for granted.
func (p *probe) quiet() bool { return p == nil || (p.conn.Read(p.ask) == nil && p.open) }
