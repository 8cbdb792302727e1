package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/penstock/penstock/internal/stream"
)

// passing is the body of one answer on its way to the client.
type passing struct {
	call   *call
	cancel context.CancelCauseFunc
	out    stream.Writer // to the client
	events bool          // server-sent events: each read is sent at once
	whole  bool          // the length is known: nothing is sent early
	counts bool          // it is of a form in which workers report tokens
	cut    eventCut
	failed error // of the client's connection

	began   time.Time     // when the first bytes of the body were there
	silence time.Duration // longest between two bytes of the worker; 0: no limit
	reset   time.Time     // when the limit of the call was set last
}

// timersEvery is how often the limit on silence is moved while bytes flow: moving it for each chunk costs more than the
// chunk.
const timersEvery = 100 * time.Millisecond

// watch begins the limit on silence, with the timer of the call.
func (p *passing) watch(silence time.Duration) {
	p.silence = silence
	if silence > 0 {
		p.call.limit.Reset(silence)
	}
	p.reset = time.Now()
	p.began = p.reset
}

func (p *passing) unwatch() {
	p.call.limit.Stop()
	p.out.Release()
}

// heard notes that the worker has sent something, once that is with the client: how long the client took for it is no
// silence of the worker.
func (p *passing) heard() {
	if now := time.Now(); now.Sub(p.reset) > timersEvery {
		p.reset = now
		if p.silence > 0 {
			p.call.limit.Reset(p.silence)
		}
	}
}

// write sends bytes of the worker to the client. The limit on silence rests meanwhile.
func (p *passing) write(b []byte) error {
	p.call.writing.Store(true)
	defer p.call.writing.Store(false)
	if p.events && p.call.cut {
		b = p.cut.pass(b)
	}
	err := p.send(b)
	p.heard()
	return err
}

func (p *passing) send(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	var err error
	if p.whole {
		_, err = p.out.Write(b)
	} else {
		err = p.out.Send(b)
	}
	if err != nil {
		p.failed = errStalled
		p.cancel(errStalled)
		return errStalled
	}
	return nil
}

// finish sends what was held back until the end.
func (p *passing) finish() error {
	if !p.events || !p.call.cut {
		return nil
	}
	return p.send(p.cut.rest())
}

// breakOff ends a stream that went wrong with an error event, and without [DONE].
func (p *passing) breakOff(cause error) {
	code := DropUpstream
	if errors.Is(cause, context.DeadlineExceeded) {
		code = DropDeadline
	}
	message := "the answer broke off: " + worded(cause)
	name, content := "", any(envelope{Error: envelopeError{Message: message, Type: "server_error", Code: string(code)}})
	if p.call.path == messagesPath {
		name = "event: error\n"
		content = messagesError{"error", map[string]string{"type": "api_error", "message": message}}
	}
	event, err := json.Marshal(content)
	if err == nil { // texts always have a form in JSON
		_ = p.send([]byte("\n\n" + name + "data: " + string(event) + "\n\n")) // the client may be gone as well
	}
}

// messagesPath is the path of Anthropic's API. Its clients heed named events alone, in this form.
const messagesPath = "/v1/messages"

type messagesError struct {
	Type  string            `json:"type"`
	Error map[string]string `json:"error"`
}

// worded keeps addresses of workers out of what clients read.
func worded(err error) string {
	switch {
	case errors.Is(err, errSilence), errors.Is(err, errFirstByte), errors.Is(err, errGoesOn),
		errors.Is(err, errRefused):
		return err.Error()
	case errors.Is(err, context.DeadlineExceeded):
		return "the deadline of the request was over"
	}
	return "the connection to the worker failed"
}
