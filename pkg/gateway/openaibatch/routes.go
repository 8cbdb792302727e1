package openaibatch

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
)

// Config of Batches. The zero value works.
type Config struct {
	Hint func(queue int32) // tells nodes that entries were committed; nil: they poll
	Log  *slog.Logger

	// Tests set these.
	fileMax int64         // bytes of a file: 200 MiB
	turnMax time.Duration // of work on one batch, before the next one: 2 min
}

const (
	linesMax  = 50_000                 // of a batch
	lineMax   = 8 << 20                // bytes
	workEvery = 500 * time.Millisecond // between two looks for work where there was none
	// limitedLeast is for how long a batch rests at least whose lines wait for the rate of a token. A token that
	// lets in less at once than comes in that time loses the rest of its rate: a turn costs two commits, however few
	// its lines.
	limitedLeast = 50 * time.Millisecond
)

// Batches serves the routes of files and batches, and works on batches.
type Batches struct {
	config  Config
	db      postgres.DB
	gateway *gateway.Gateway
	log     *slog.Logger
	wake    chan struct{} // holds one
	clock   duty.Clock    // judges the database's clock for what is deleted or ended by it

	taking, sweeping duty.Failing

	limited time.Duration // of Run alone: the shortest rest for the rate of a token since its last pause; 0: none
}

// New returns the files and batches on a database, for the models and tokens of a gateway.
func New(config Config, g *gateway.Gateway, db postgres.DB) *Batches {
	config.fileMax = cmp.Or(config.fileMax, 200<<20)
	config.turnMax = cmp.Or(config.turnMax, 2*time.Minute)
	return &Batches{
		config: config, db: db, gateway: g, log: cmp.Or(config.Log, slog.Default()), wake: make(chan struct{}, 1),
	}
}

// statementMax bounds the statements of a request, but for those of a file.
const statementMax = 10 * time.Second

// Mount adds the routes to the gateway.
func (s *Batches) Mount() {
	s.route("POST /v1/files", s.upload)
	s.route("GET /v1/files", bounded(s.listFiles))
	s.route("GET /v1/files/{id}", bounded(s.oneFile))
	s.route("DELETE /v1/files/{id}", bounded(s.deleteFile))
	s.route("GET /v1/files/{id}/content", s.content)
	s.route("POST /v1/batches", bounded(s.create))
	s.route("GET /v1/batches", bounded(s.listBatches))
	s.route("GET /v1/batches/{id}", bounded(s.oneBatch))
	s.gateway.MountFor("POST /v1/batches/{id}/cancel", s.gateway.AdmitWithoutWork, bounded(s.cancel), s.refuse)
}

func (s *Batches) route(pattern string, serve gateway.Route) {
	s.gateway.MountFor(pattern, s.gateway.Admit, serve, s.refuse)
}

// bounded is a route that ends within statementMax.
func bounded(serve gateway.Route) gateway.Route {
	return func(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
		ctx, cancel := context.WithTimeout(r.Context(), statementMax)
		defer cancel()
		return serve(w, r.WithContext(ctx), c)
	}
}

func (s *Batches) refuse(w http.ResponseWriter, r *http.Request, err error) {
	gateway.AnswerError(w, s.said(r, err))
}

// said turns what went wrong into the error that the client gets.
func (s *Batches) said(r *http.Request, err error) error {
	switch {
	case errors.Is(err, errNoFile):
		return gateway.BadRequest(http.StatusNotFound, "not_found", "id", "there is no file %q", r.PathValue("id"))
	case errors.Is(err, errNoBatch):
		return gateway.BadRequest(http.StatusNotFound, "not_found", "id", "there is no batch %q", r.PathValue("id"))
	}
	if status, _ := gateway.ErrorOf(err); status != http.StatusInternalServerError {
		return err
	}
	if r.Context().Err() != nil {
		return &gateway.Rejection{Reason: gateway.DropCancelled}
	}
	if postgres.BadText(err) {
		return gateway.BadRequest(http.StatusBadRequest, "invalid_value", "",
			"a text of the request is not UTF-8, or has NUL")
	}
	s.log.Warn("files and batches", "method", r.Method, "path", r.URL.Path, "error", err)
	if postgres.Unavailable(err) {
		return gateway.BadRequest(http.StatusServiceUnavailable, "database_unavailable", "",
			"files and batches are not available now: send the request again")
	}
	return gateway.BadRequest(http.StatusInternalServerError, "internal_error", "", "the request failed")
}

// list is a page of objects.
type list[T any] struct {
	Object  string  `json:"object"`
	Data    []T     `json:"data"`
	FirstID *string `json:"first_id"`
	LastID  *string `json:"last_id"`
	HasMore bool    `json:"has_more"`
}

func limitOf(text string, usual, most int) (int, error) {
	if text == "" {
		return usual, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > most {
		return 0, gateway.BadRequest(http.StatusBadRequest, "invalid_value", "limit",
			"limit must be from 1 to %d, not %q", most, text)
	}
	return n, nil
}

// creation is the body of POST /v1/batches.
type creation struct {
	InputFileID        string            `json:"input_file_id"`
	Endpoint           string            `json:"endpoint"`
	CompletionWindow   string            `json:"completion_window"`
	Metadata           map[string]string `json:"metadata"`
	OutputExpiresAfter *struct {
		Anchor  string `json:"anchor"`
		Seconds int64  `json:"seconds"`
	} `json:"output_expires_after"`
}

const creationBytesMax = 64 << 10

func (s *Batches) create(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
	body, err := io.ReadAll(io.LimitReader(r.Body, creationBytesMax+1))
	if err != nil || len(body) > creationBytesMax {
		return gateway.BadRequest(http.StatusBadRequest, "unreadable_body", "",
			"the body broke off, took longer than a minute, or is too large")
	}
	var ask creation
	if err := json.Unmarshal(body, &ask); err != nil {
		return gateway.BadRequest(http.StatusBadRequest, "invalid_json", "", "the body is not a batch: %s", err)
	}
	o, err := ask.order()
	if err != nil {
		return err
	}
	o.Owner, o.Flow = c.Name, c.Flow
	b, err := createBatch(r.Context(), s.db, o)
	if err != nil {
		return err
	}
	s.nudge()
	gateway.AnswerJSON(w, r, http.StatusOK, b.object())
	return nil
}

// Bounds on what a batch may ask for.
const (
	windowMin        = time.Second
	windowMax        = 14 * 24 * time.Hour
	metadataKeysMax  = 16
	metadataKeyMax   = 64
	metadataValueMax = 512
)

// order checks what was asked for, but for the input file.
func (c creation) order() (o order, err error) {
	invalid := func(field, format string, args ...any) (order, error) {
		return order{}, gateway.BadRequest(http.StatusBadRequest, "invalid_value", field, format, args...)
	}
	o = order{Input: c.InputFileID, Endpoint: c.Endpoint, Window: c.CompletionWindow}
	if _, ok := gateway.Operation(c.Endpoint); !ok {
		return invalid("endpoint", "batches of %q are not supported", c.Endpoint)
	}
	if o.Lasts, err = time.ParseDuration(c.CompletionWindow); err != nil || o.Lasts < windowMin || o.Lasts > windowMax {
		return invalid("completion_window", "completion_window is %q: want 24h, or a duration from 1s to 336h",
			c.CompletionWindow)
	}
	if len(c.Metadata) > metadataKeysMax {
		return invalid("metadata", "metadata has %d keys, more than %d", len(c.Metadata), metadataKeysMax)
	}
	for key, value := range c.Metadata {
		if utf8.RuneCountInString(key) > metadataKeyMax || utf8.RuneCountInString(value) > metadataValueMax {
			return invalid("metadata", "a key of metadata has at most %d characters, a value %d", metadataKeyMax,
				metadataValueMax)
		}
	}
	if c.Metadata != nil {
		if o.Metadata, err = json.Marshal(c.Metadata); err != nil {
			return o, fmt.Errorf("write metadata: %w", err)
		}
	}
	if e := c.OutputExpiresAfter; e != nil {
		kept, err := keptFor(e.Anchor, strconv.FormatInt(e.Seconds, 10))
		if err != nil {
			return invalid("output_expires_after",
				"output_expires_after needs the anchor created_at and from 3600 to 2592000 seconds")
		}
		o.Kept = &kept
	}
	return o, nil
}

func (s *Batches) oneBatch(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
	b, err := oneBatch(postgres.Query(r.Context(), s.db, batchSQL, r.PathValue("id"), c.Name))
	if err != nil {
		return err
	}
	gateway.AnswerJSON(w, r, http.StatusOK, b.object())
	return nil
}

func (s *Batches) listBatches(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
	limit, err := limitOf(r.URL.Query().Get("limit"), 20, 100)
	if err != nil {
		return err
	}
	rows, err := batchesOf(r.Context(), s.db, c.Name, r.URL.Query().Get("after"), limit+1)
	if err != nil {
		return err
	}
	page := list[batchObject]{Object: "list", Data: []batchObject{}, HasMore: len(rows) > limit}
	for _, b := range rows[:min(limit, len(rows))] {
		page.Data = append(page.Data, b.object())
	}
	if n := len(page.Data); n > 0 {
		page.FirstID, page.LastID = &page.Data[0].ID, &page.Data[n-1].ID
	}
	gateway.AnswerJSON(w, r, http.StatusOK, page)
	return nil
}

func (s *Batches) cancel(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
	id := r.PathValue("id")
	b, err := oneBatch(postgres.Query(r.Context(), s.db, cancelSQL, id, c.Name))
	if errors.Is(err, errNoBatch) {
		if b, err = oneBatch(postgres.Query(r.Context(), s.db, batchSQL, id, c.Name)); err == nil &&
			b.Status != cancelling && b.Status != cancelled {
			return gateway.BadRequest(http.StatusBadRequest, "invalid_state", "", "the batch is %s", b.Status)
		}
	}
	if err != nil {
		return err
	}
	s.nudge()
	gateway.AnswerJSON(w, r, http.StatusOK, b.object())
	return nil
}
