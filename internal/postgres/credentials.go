package postgres

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Connect opens one connection outside any pool. Password and certificates that the address of cc names by file are
// read anew; see reread. Each server that the address names has connectTimeout, or the connect_timeout of the address:
// a bound on all of them would leave nothing for the second where the first is gone without an answer.
func Connect(ctx context.Context, cc *pgx.ConnConfig) (*pgx.Conn, error) {
	cc = cc.Copy()
	cc.ConnectTimeout = cmp.Or(cc.ConnectTimeout, connectTimeout)
	if err := reread(ctx, cc); err != nil {
		return nil, err
	}
	return pgx.ConnectConfig(ctx, cc)
}

// reread takes the password and the TLS settings of cc anew from its address, as libpq does for each connection:
// passfile, sslcert, sslkey, sslrootcert and servicefile may have been replaced since the program started, and the
// server accepts the earlier ones no more. While they are being replaced they may not fit each other: that fails this
// connection alone, by an error for which Unavailable is true.
func reread(_ context.Context, cc *pgx.ConnConfig) error {
	now, err := pgx.ParseConfig(cc.ConnString())
	if err != nil {
		return fmt.Errorf("read database address: %w", err)
	}
	if now.Password != "" && now.User == cc.User { // a service file may name another user now
		cc.Password = now.Password
	}
	if now.Host != cc.Host || now.Port != cc.Port || !slices.EqualFunc(now.Fallbacks, cc.Fallbacks, sameServer) {
		return nil // the servers are not those of the address: TLS settings belong to a server
	}
	cc.TLSConfig = now.TLSConfig
	for i, server := range now.Fallbacks {
		cc.Fallbacks[i].TLSConfig = server.TLSConfig
	}
	return nil
}

func sameServer(a, b *pgconn.FallbackConfig) bool { return a.Host == b.Host && a.Port == b.Port }
