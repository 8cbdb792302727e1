//go:build !linux

package postgres

import "net"

// endUnacknowledged does nothing: the option is Linux's own.
func endUnacknowledged(*net.TCPConn) error { return nil }
