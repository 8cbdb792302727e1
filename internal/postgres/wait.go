package postgres

import (
	"context"
	"errors"
	"log/slog"
	"time"
)

// Wait calls try until it succeeds, with a growing delay after errors that pass (see Passes), then
// runs Check and logs its advice. It returns nil early when ctx ends, and at once any permanent
// error: ErrIsolation, ErrPooler, permanent errors of the server, those of a session that it refuses included, and
// errors with a method Final.
func Wait(ctx context.Context, db DB, log *slog.Logger, try func() error) error {
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		err := ForPooler(try())
		if err == nil {
			var advice []string
			if advice, err = Check(ctx, db); len(advice) > 0 {
				log.Warn("sessions behind the pooler lack settings; set them for the role", "statements",
					advice)
			}
		}
		if err == nil || ctx.Err() != nil {
			return nil
		}
		var final interface{ Final() }
		misfit := errors.Is(err, ErrIsolation) || errors.Is(err, ErrPooler)
		if misfit || errors.As(err, &final) || refused(err) || !Passes(err) {
			return err
		}
		log.Warn("waiting for the database", "error", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}
