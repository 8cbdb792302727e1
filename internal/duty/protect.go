package duty

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
)

// ErrPanic is in the error of what panicked under Protect.
var ErrPanic = errors.New("panicked")

// Protect runs a part of a duty, and turns a panic into an error: the part has failed, and the process goes on. It
// logs the panic with its stack. Only the goroutine that panics can recover: each one that works for a duty has its own
// Protect. A timer that only tells another goroutine has none.
func Protect(ctx context.Context, log *slog.Logger, run func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			log.ErrorContext(ctx, "a duty panicked", "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("%w: %v", ErrPanic, p)
		}
	}()
	return run()
}
