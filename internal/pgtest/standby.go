package pgtest

import "time"

// Standbys sets synchronous_standby_names. It returns once commits wait for those that it names; without a name, once
// a session has read the setting. The server needs max_wal_senders above 0.
func (o *Own) Standbys(names string) {
	o.t.Helper()
	ctx, db := o.t.Context(), o.Pool()
	defer db.Close()
	must := func(err error) {
		o.t.Helper()
		if err != nil {
			o.t.Fatalf("set synchronous_standby_names of the Postgres of this test: %v", err)
		}
	}
	_, err := db.Exec(ctx, `ALTER SYSTEM SET synchronous_standby_names = '`+names+`'`)
	must(err)
	_, err = db.Exec(ctx, `SELECT pg_reload_conf()`)
	must(err)
	for read := ""; read != names; time.Sleep(2 * time.Millisecond) {
		must(db.QueryRow(ctx, `SHOW synchronous_standby_names`).Scan(&read))
	}
	if names == "" {
		return // the process that reads it last releases the commits that wait
	}

	// Commits wait once the checkpointer has read the setting, which may be long after a session did.
	session, err := db.Acquire(ctx)
	must(err)
	defer session.Release()
	_, err = session.Exec(ctx, `SET synchronous_commit = on`)
	must(err)
	for waiting := false; !waiting; {
		ended := make(chan error, 1)
		go func() {
			_, err := session.Exec(ctx, `SELECT pg_logical_emit_message(true, 'pgtest', '')`)
			ended <- err
		}()
		for committed := false; !committed; {
			select {
			case err := <-ended:
				must(err)
				committed = true
			case <-time.After(2 * time.Millisecond):
				cancelled := false
				must(db.QueryRow(ctx, `
SELECT coalesce(bool_or(pg_cancel_backend(pid)), false) FROM pg_stat_activity
 WHERE pid = $1 AND wait_event = 'SyncRep'`, session.Conn().PgConn().PID()).Scan(&cancelled))
				waiting = waiting || cancelled
			}
		}
	}
}
