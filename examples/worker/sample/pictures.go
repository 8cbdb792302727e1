package sample

import (
	"bytes"
	_ "embed"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/jpeg"

	xdraw "golang.org/x/image/draw"
)

// The portrait is test data of the pigo module; its licence stands beside it.
//
//go:embed portrait.jpg
var portrait []byte

// Picture is a small JPEG and the number of faces in it.
type Picture struct {
	JPEG  []byte
	Faces int
}

// Layouts repeat after this many pictures.
const layouts = 5

// Pictures makes n group pictures out of one portrait: none to four faces, some mirrored, of varying
// size and brightness. Each is at most 40 KB, and picture i is the same each time.
func Pictures(n int) ([]Picture, error) {
	face, err := jpeg.Decode(bytes.NewReader(portrait))
	if err != nil {
		return nil, fmt.Errorf("decode portrait: %w", err)
	}
	pictures := make([]Picture, n)
	for i := range pictures {
		faces := (i + 1) % layouts
		var out bytes.Buffer
		if err := jpeg.Encode(&out, group(face, faces, i), &jpeg.Options{Quality: 80}); err != nil {
			return nil, fmt.Errorf("encode picture %d: %w", i, err)
		}
		pictures[i] = Picture{JPEG: out.Bytes(), Faces: faces}
	}
	return pictures, nil
}

// group stands the faces side by side before a plain wall; an empty wall where there are none.
func group(face image.Image, faces, variant int) image.Image {
	const margin = 10
	width := 120 + 20*(variant/layouts%3) // px of one portrait: 120, 140 or 160
	height := width * face.Bounds().Dy() / face.Bounds().Dx()
	wall := image.Rect(0, 0, max(faces, 1)*(width+margin)+margin, height+2*margin)
	picture := image.NewRGBA(wall)
	shade := uint8(200 + variant*7%40)
	draw.Draw(picture, wall, image.NewUniform(color.RGBA{shade, shade, shade, 255}), image.Point{}, draw.Src)
	for k := range faces {
		at := image.Rect(0, 0, width, height).Add(image.Pt(margin+k*(width+margin), margin))
		xdraw.CatmullRom.Scale(picture, at, face, face.Bounds(), draw.Src, nil)
		if (k+variant)%2 == 1 {
			mirror(picture, at)
		}
	}
	return picture
}

func mirror(picture *image.RGBA, at image.Rectangle) {
	for y := at.Min.Y; y < at.Max.Y; y++ {
		for left, right := at.Min.X, at.Max.X-1; left < right; left, right = left+1, right-1 {
			a, b := picture.RGBAAt(left, y), picture.RGBAAt(right, y)
			picture.SetRGBA(left, y, b)
			picture.SetRGBA(right, y, a)
		}
	}
}
