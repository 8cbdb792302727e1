package main

import (
	"context"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/migrations"
	"github.com/penstock/penstock/pkg/api"
	"github.com/penstock/penstock/pkg/client"
	"github.com/penstock/penstock/pkg/worker"
)

// localURL is the address of requests to the handler in this process. Nothing resolves it.
const localURL = "http://localhost"

// inProcess returns a connection to an API handler in this process that works on the database, so that commands run
// without a leader. The handler acts under the name of the actor, with every right.
func (a *app) inProcess(ctx context.Context) (conn, error) {
	if a.handler == nil {
		pool, err := a.database(ctx)
		if err != nil {
			return conn{}, err
		}
		a.keeper.DB = pool
		handler := api.New(pool, api.Config{
			Actor: a.actor, Timeout: a.timeout, ReadModel: worker.EffectiveConfig, OnError: keepError,
			Webhooks: &a.keeper,
		})
		a.handler = checksChanges(handler, handler.Reads, func(ctx context.Context) error {
			return migrations.CheckIfReadable(ctx, pool)
		})
	}
	transport := handlerTransport{a.handler}
	return conn{client.New(client.Config{
		URL: localURL, Tries: 1,
		// Longer than the handler's own limit, so that its answer says what took the time.
		HTTP: &http.Client{Transport: transport, Timeout: a.timeout + 5*time.Second},
	})}, nil
}

// poolConfig is that of a program that serves the API in its own process.
func (a *app) poolConfig() postgres.Config {
	return api.Pool(postgres.Config{
		DSN: a.databaseURL, Pooled: a.pooled, StatementTimeout: a.timeout,
		LateAnswers: true, // doctor --deep
	})
}

// checksChanges returns a handler that calls check before the first request that may change something, and refuses it
// with the error. Functions of an older schema may take and return something else: a change could be made and then be
// reported as failed. Requests that only read, whatever their method, pass.
func checksChanges(handler http.Handler, reads func(*http.Request) bool, check func(context.Context) error,
) http.Handler {
	var checked atomic.Bool
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !checked.Load() && !reads(r) {
			if err := check(r.Context()); err != nil {
				keepError(r.Context(), err)
				w.WriteHeader(http.StatusInternalServerError)
				return
			}
			checked.Store(true)
		}
		handler.ServeHTTP(w, r)
	})
}

// localError is an error of the handler in this process, which is reported in place of the API's answer: a user who
// has the address of the database may read the database's own words.
type localError struct{ err error }

func (e *localError) Error() string { return e.err.Error() }
func (e *localError) Unwrap() error { return e.err }

// errorKey is the context key of the channel into which keepError puts the error of a request.
type errorKey struct{}

// keepError keeps the error behind an answer for the transport, which returns it instead of the answer.
func keepError(ctx context.Context, err error) {
	kept, ok := ctx.Value(errorKey{}).(chan error)
	if !ok {
		return
	}
	select {
	case kept <- err:
	default: // the first error of a request is the cause of the others
	}
}
