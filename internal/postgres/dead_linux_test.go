package postgres

import (
	"net"
	"syscall"
	"testing"
	"time"
)

// A connection whose other end is gone must not hold a program up for a quarter of an hour.
func TestConnectionsEndWhenTheOtherEndIsSilent(t *testing.T) {
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	cc, err := ConnConfig(Config{DSN: "postgres://u@" + listener.Addr().String() + "/d"})
	if err != nil {
		t.Fatal(err)
	}
	conn, err := cc.DialFunc(t.Context(), "tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	wrapped, ok := conn.(*closesSoon)
	if !ok {
		t.Fatalf("connection is %T", conn)
	}
	tcp, ok := wrapped.Conn.(*net.TCPConn)
	if !ok {
		t.Fatalf("connection is on %T", wrapped.Conn)
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	option := func(number int) (value int) {
		var failed error
		err := raw.Control(func(fd uintptr) {
			value, failed = syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, number)
		})
		if err != nil || failed != nil {
			t.Fatal(err, failed)
		}
		return value
	}
	probed := time.Duration(option(syscall.TCP_KEEPIDLE)+option(syscall.TCP_KEEPINTVL)*option(syscall.TCP_KEEPCNT)) *
		time.Second
	if probed > 20*time.Second {
		t.Errorf("a connection without an answer ends after %v", probed)
	}
	if unacknowledged := time.Duration(option(tcpUserTimeout)) * time.Millisecond; unacknowledged != silentTimeout {
		t.Errorf("what is not acknowledged ends a connection after %v, want %v", unacknowledged, silentTimeout)
	}
}
