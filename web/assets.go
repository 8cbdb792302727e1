package web

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"fmt"
	"mime"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"
)

//go:embed static templates
var files embed.FS

// asset is a file that browsers load.
type asset struct {
	name, kind   string
	text, zipped []byte
	version      string // from its hash: the address of another version is another one
}

// assets are the files by their names.
type assets struct {
	root  string
	files map[string]asset
}

// Address returns the address of a file, which changes with its text.
func (a assets) Address(name string) (string, error) {
	f, found := a.files[name]
	if !found {
		return "", fmt.Errorf("there is no file %q", name)
	}
	return a.root + "static/" + f.version + "/" + name, nil
}

// bundles are the files that browsers load, each made of one or several files in static. Together
// they compress better, and a page needs one request for its script and one for its style.
var bundles = []struct {
	name  string
	parts []string
}{
	{"app.js", []string{"uplot.min.js", "htmx.min.js", "app.js"}},
	{"app.css", []string{"uplot.min.css", "app.css", "picture.css"}},
	{"theme.js", []string{"theme.js"}},
	{"icon.svg", []string{"icon.svg"}},
}

// loadAssets reads and compresses the files once.
func loadAssets(root string) (assets, error) {
	a := assets{root: root, files: map[string]asset{}}
	for _, b := range bundles {
		var text []byte
		for _, part := range b.parts {
			own, err := files.ReadFile("static/" + part)
			if err != nil {
				return a, fmt.Errorf("read files of the dashboard: %w", err)
			}
			if !strings.Contains(part, ".min.") {
				own = withoutIndent(own, path.Ext(part) == ".css")
			}
			text = append(append(text, own...), '\n')
		}
		a.files[b.name] = asset{
			name: b.name, kind: mime.TypeByExtension(path.Ext(b.name)), text: text, zipped: zip(text),
			version: fmt.Sprintf("%.6x", sha256.Sum256(text)),
		}
	}
	return a, nil
}

// withoutIndent leaves out white space at the begin of lines, lines that are a comment, and line ends that separate
// nothing: a file of ours has no text of several lines. In script a line end after } may end a statement.
func withoutIndent(text []byte, style bool) []byte {
	separators := ";{,"
	if style {
		separators += "}"
	}
	var short []byte
	for line := range bytes.Lines(text) {
		line = bytes.TrimLeft(line, " \t")
		ofStyle := bytes.HasPrefix(line, []byte("/*")) && bytes.HasSuffix(line, []byte("*/\n"))
		if !bytes.HasPrefix(line, []byte("// ")) && !ofStyle {
			if end := len(line) - 2; end >= 0 && line[end+1] == '\n' && strings.IndexByte(separators, line[end]) >= 0 {
				line = line[:end+1]
			}
			short = append(short, line...)
		}
	}
	return short
}

func zip(text []byte) []byte {
	var b bytes.Buffer
	w, _ := gzip.NewWriterLevel(&b, gzip.BestCompression) // the level is a valid one
	_, _ = w.Write(text)                                  // into memory
	_ = w.Close()
	return b.Bytes()
}

// assetRoutes serves the files, without a login: they hold no data. A browser keeps them for a
// year.
func (d *Dashboard) assetRoutes() {
	d.mux.HandleFunc("GET "+d.cfg.Path+"static/{version}/{name}", func(w http.ResponseWriter, r *http.Request) {
		f, found := d.assets.files[r.PathValue("name")]
		if !found {
			http.NotFound(w, r)
			return
		}
		h := w.Header()
		h.Set("Content-Type", f.kind)
		h.Set("Vary", "Accept-Encoding")
		h.Set("Cache-Control", "no-cache")
		if r.PathValue("version") == f.version {
			h.Set("Cache-Control", "public, max-age="+strconv.Itoa(int((365*24*time.Hour).Seconds()))+", "+
				"immutable")
		}
		text := f.text
		if acceptsGzip(r) {
			h.Set("Content-Encoding", "gzip")
			text = f.zipped
		}
		h.Set("Content-Length", strconv.Itoa(len(text)))
		_, _ = w.Write(text) // the browser may have gone
	})
}
