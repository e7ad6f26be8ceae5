/* Decodes a rectangle of a baseline JPEG to RGB with libjpeg-turbo: rows above it are passed over without their inverse
 * transform, columns beside it never leave the entropy decoder, rows below it are not read at all.
 *
 * One function, called through ctypes, which holds no lock of Python's meanwhile. No global state. */

#include <setjmp.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>

#ifndef LIBJPEG_TURBO_VERSION
#error "libjpeg-turbo is needed: others cannot decode a part"
#endif

struct failure {
  struct jpeg_error_mgr base;
  jmp_buf back;
  char *message;
};

static void fail(j_common_ptr cinfo) {
  struct failure *failure = (struct failure *)cinfo->err;
  (*cinfo->err->format_message)(cinfo, failure->message);
  longjmp(failure->back, 1);
}

/* A warning means pixels that the file does not hold; what is made up is never handed out. */
static void fail_on_warning(j_common_ptr cinfo, int level) {
  if (level < 0) fail(cinfo);
}

/* The version of this interface, compared by the caller. */
int vitscale_crop_version(void) { return 1; }

/* Rows [top, top + height) of columns [left, left + width), RGB, into `pixels`, whose rows are `stride` bytes apart.
 *
 * The decoder begins at a block, so up to 15 columns before `left` come too: the rows in `pixels` begin at the column
 * that is returned, and `stride` must hold 3 * (width + 31) bytes. The caller knows from the header that the rectangle
 * lies in the picture, whose size is compared. On failure -1, with the reason in `message` (JMSG_LENGTH_MAX bytes). */
int vitscale_crop(const unsigned char *content, unsigned long length, int full_height, int full_width, int top, int left,
                  int height, int width, unsigned char *pixels, unsigned long stride, char *message) {
  struct jpeg_decompress_struct cinfo;
  struct failure failure;
  JDIMENSION from = (JDIMENSION)left, columns = (JDIMENSION)width;
  int row;

  cinfo.err = jpeg_std_error(&failure.base);
  failure.base.error_exit = fail;
  failure.base.emit_message = fail_on_warning;
  failure.message = message;
  if (setjmp(failure.back)) {
    jpeg_destroy_decompress(&cinfo);
    return -1;
  }
  jpeg_create_decompress(&cinfo);
  jpeg_mem_src(&cinfo, content, length);
  jpeg_read_header(&cinfo, TRUE);
  if (cinfo.image_height != (JDIMENSION)full_height || cinfo.image_width != (JDIMENSION)full_width) {
    strcpy(message, "another size than its header says");
    jpeg_destroy_decompress(&cinfo);
    return -1;
  }
  cinfo.out_color_space = JCS_RGB;
  jpeg_start_decompress(&cinfo);
  if (columns < cinfo.output_width) jpeg_crop_scanline(&cinfo, &from, &columns);
  if (columns * 3 > stride || (top && jpeg_skip_scanlines(&cinfo, (JDIMENSION)top) != (JDIMENSION)top)) {
    strcpy(message, "rows or columns that do not come");
    jpeg_destroy_decompress(&cinfo);
    return -1;
  }
  for (row = 0; row < height; row++) {
    JSAMPROW line = pixels + (unsigned long)row * stride;
    if (jpeg_read_scanlines(&cinfo, &line, 1) != 1) {
      strcpy(message, "rows that do not come");
      jpeg_destroy_decompress(&cinfo);
      return -1;
    }
  }
  jpeg_destroy_decompress(&cinfo);
  return (int)from;
}
