package machine

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
)

// FreePort returns a TCP port of 127.0.0.1 on which nothing listens, for a program that a test starts. It is below
// those that systems give to a listener or a connection without one, which would take it before the program does.
func FreePort(t testing.TB) int {
	t.Helper()
	for range 100 {
		port := 10_000 + rand.IntN(20_000) //nolint:gosec // no secret
		listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			_ = listener.Close()
			return port
		}
	}
	t.Fatal("no port is free")
	return 0
}
