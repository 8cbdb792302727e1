package openaibatch

import (
	"context"
	"errors"
	"io"
	"mime/multipart"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/internal/stream"
	"github.com/penstock/penstock/pkg/gateway"
)

// Bounds on files.
const (
	purposeBatch  = "batch"
	purposeOutput = "batch_output"
	uploadPause   = 60 * time.Second // that a client may make while it sends or reads a file
	batchFileKept = 30 * 24 * time.Hour
	filenameMax   = 1024 // bytes
	keptMin       = time.Hour
	keptMax       = 30 * 24 * time.Hour
)

// fileObject is a file as clients see it.
type fileObject struct {
	ID        string `json:"id"`
	Object    string `json:"object"`
	Bytes     int64  `json:"bytes"`
	CreatedAt int64  `json:"created_at"`
	ExpiresAt *int64 `json:"expires_at,omitempty"`
	Filename  string `json:"filename"`
	Purpose   string `json:"purpose"`
	Status    string `json:"status"`
}

func (f fileRow) object() fileObject {
	return fileObject{
		ID: f.ID, Object: "file", Bytes: f.Bytes, CreatedAt: f.Created.Unix(), ExpiresAt: unix(f.Expires),
		Filename: f.Filename, Purpose: f.Purpose, Status: "processed",
	}
}

func unix(t *time.Time) *int64 {
	if t == nil {
		return nil
	}
	s := t.Unix()
	return &s
}

// upload stores the file of a form as its bytes arrive: the other fields may follow it.
func (s *Batches) upload(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
	u, err := s.receive(w, r, c.Name)
	if err != nil {
		return err
	}
	f, err := u.read(r.Context())
	_ = u.control.SetReadDeadline(time.Time{}) // a test's writer has none
	if err != nil && u.id != "" {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), statementMax)
		defer cancel()
		if dropped := dropFile(ctx, s.db, u.id); dropped != nil {
			s.log.Warn("file that was not uploaded whole is left", "file", u.id, "error", dropped)
		}
	}
	if err != nil {
		return err
	}
	gateway.AnswerJSON(w, r, http.StatusOK, f.object())
	return nil
}

// upload is a form on its way into a file.
type upload struct {
	service  *Batches
	form     *multipart.Reader
	control  *http.ResponseController
	owner    string
	fields   url.Values
	id       string
	filename string
}

// Bounds of a form beside its file.
const (
	formBytesMax  = 64 << 10 // of the other fields, with headers and boundaries
	formPartsMax  = 32
	fieldBytesMax = 4 << 10
)

// formFields are the fields that are read; others are passed over.
var formFields = []string{"purpose", "expires_after[anchor]", "expires_after[seconds]"}

// receive begins to read a form.
func (s *Batches) receive(w http.ResponseWriter, r *http.Request, owner string) (*upload, error) {
	r.Body = io.NopCloser(gateway.WholeForm(http.MaxBytesReader(w, r.Body, s.config.fileMax+formBytesMax)))
	form, err := r.MultipartReader()
	if err != nil {
		return nil, gateway.BadRequest(http.StatusBadRequest, "invalid_form", "",
			"the body must be multipart/form-data")
	}
	return &upload{
		service: s, form: form, control: http.NewResponseController(w), owner: owner, fields: url.Values{},
	}, nil
}

func (u *upload) read(ctx context.Context) (fileRow, error) {
	for parts := 0; ; parts++ {
		_ = u.control.SetReadDeadline(time.Now().Add(uploadPause))
		part, err := u.form.NextPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil && parts == formPartsMax {
			return fileRow{}, gateway.BadRequest(http.StatusBadRequest, "invalid_form", "",
				"the form has more than %d parts", formPartsMax)
		}
		if err != nil {
			return fileRow{}, brokenForm(err)
		}
		switch {
		case part.FormName() == "file" && u.id != "":
			return fileRow{}, gateway.BadRequest(http.StatusBadRequest, "invalid_form", "file", "there are two files")
		case part.FormName() == "file":
			u.filename = part.FileName()
			if err := u.store(ctx, part); err != nil {
				return fileRow{}, err
			}
		case slices.Contains(formFields, part.FormName()):
			value, err := io.ReadAll(io.LimitReader(part, fieldBytesMax))
			if err != nil {
				return fileRow{}, brokenForm(err)
			}
			u.fields.Set(part.FormName(), string(value))
		}
	}
	return u.finish(ctx)
}

func brokenForm(err error) error {
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		return gateway.BadRequest(http.StatusRequestEntityTooLarge, "file_too_large", "file",
			"the form has more than %d bytes", large.Limit)
	}
	return gateway.BadRequest(http.StatusBadRequest, "invalid_form", "", "the form cannot be read: %s", err)
}

// store writes the file in chunks of chunkBytes.
func (u *upload) store(ctx context.Context, part io.Reader) (err error) {
	err = postgres.InTx(ctx, u.service.db, func(tx pgx.Tx) (err error) {
		if err := lockQuota(ctx, tx, u.owner); err != nil {
			return err
		}
		u.id, err = createFile(ctx, tx, u.owner, clip(u.filename), purposeBatch)
		return err
	})
	if err != nil {
		return err
	}
	chunk := make([]byte, chunkBytes)
	checked := int64(0)
	for total := int64(0); ; {
		_ = u.control.SetReadDeadline(time.Now().Add(uploadPause))
		n, err := io.ReadFull(part, chunk)
		if total += int64(n); total > u.service.config.fileMax {
			return gateway.BadRequest(http.StatusRequestEntityTooLarge, "file_too_large", "file",
				"the file has more than %d bytes", u.service.config.fileMax)
		}
		if failed := appendFile(ctx, u.service.db, u.id, chunk[:n]); failed != nil {
			return failed
		}
		if total-checked >= quotaStep {
			if over := checkQuota(ctx, u.service.db, u.owner); over != nil {
				return over
			}
			checked = total
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return nil
		case err != nil:
			return brokenForm(err)
		}
	}
}

func clip(name string) string {
	if name == "" {
		return "file"
	}
	return gateway.ClipText(name, filenameMax)
}

// finish checks the other fields of the form and makes the file visible.
func (u *upload) finish(ctx context.Context) (fileRow, error) {
	var none fileRow
	switch purpose := u.fields.Get("purpose"); {
	case u.id == "":
		return none, gateway.BadRequest(http.StatusBadRequest, "missing_file", "file", "the form has no file")
	case purpose != purposeBatch:
		return none, gateway.BadRequest(http.StatusBadRequest, "invalid_purpose", "purpose",
			"purpose must be batch, not %q", purpose)
	}
	kept, err := keptFor(u.fields.Get("expires_after[anchor]"), u.fields.Get("expires_after[seconds]"))
	if err != nil {
		return none, err
	}
	if err := checkQuota(ctx, u.service.db, u.owner); err != nil {
		return none, err
	}
	return completeFile(ctx, u.service.db, u.id, purposeBatch, clip(u.filename), kept)
}

// keptFor reads expires_after; without it files of batches are kept for 30 days.
func keptFor(anchor, seconds string) (time.Duration, error) {
	if anchor == "" && seconds == "" {
		return batchFileKept, nil
	}
	n, err := strconv.ParseInt(seconds, 10, 64)
	if anchor != "created_at" || err != nil || n < int64(keptMin/time.Second) || n > int64(keptMax/time.Second) {
		return 0, gateway.BadRequest(http.StatusBadRequest, "invalid_value", "expires_after",
			"expires_after needs the anchor created_at and from 3600 to 2592000 seconds")
	}
	return time.Duration(n) * time.Second, nil
}

func (s *Batches) oneFile(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
	f, err := findFile(r.Context(), s.db, c.Name, r.PathValue("id"))
	if err != nil {
		return err
	}
	gateway.AnswerJSON(w, r, http.StatusOK, f.object())
	return nil
}

// copyBytes is how many bytes of a file are written at once.
const copyBytes = 32 << 10

// content sends a file as it was stored.
func (s *Batches) content(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
	f, err := findFile(r.Context(), s.db, c.Name, r.PathValue("id"))
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(f.Bytes, 10))
	to := stream.NewWriter(w, r, uploadPause)
	defer to.Release()
	if _, err := io.CopyBuffer(&to, openFile(r.Context(), s.db, f.ID, f.Bytes), make([]byte, copyBytes)); err != nil {
		s.log.Debug("file was not sent whole", "file", f.ID, "error", err)
		panic(http.ErrAbortHandler) // the client must not take a part for the whole
	}
	return nil
}

type deleted struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Deleted bool   `json:"deleted"`
}

func (s *Batches) deleteFile(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
	id := r.PathValue("id")
	if err := hideFile(r.Context(), s.db, c.Name, id); err != nil {
		return err
	}
	gateway.AnswerJSON(w, r, http.StatusOK, deleted{ID: id, Object: "file", Deleted: true})
	return nil
}

func (s *Batches) listFiles(w http.ResponseWriter, r *http.Request, c gateway.Requester) error {
	q := r.URL.Query()
	limit, err := limitOf(q.Get("limit"), 10_000, 10_000)
	if err != nil {
		return err
	}
	order := q.Get("order")
	if order != "" && order != "asc" && order != "desc" {
		return gateway.BadRequest(http.StatusBadRequest, "invalid_value", "order", "order must be asc or desc")
	}
	rows, err := listFiles(r.Context(), s.db, c.Name, q.Get("purpose"), q.Get("after"), order != "asc", limit+1)
	if err != nil {
		return err
	}
	page := list[fileObject]{Object: "list", Data: []fileObject{}, HasMore: len(rows) > limit}
	for _, f := range rows[:min(limit, len(rows))] {
		page.Data = append(page.Data, f.object())
	}
	if n := len(page.Data); n > 0 {
		page.FirstID, page.LastID = postgres.Given(page.Data[0].ID), postgres.Given(page.Data[n-1].ID)
	}
	gateway.AnswerJSON(w, r, http.StatusOK, page)
	return nil
}
